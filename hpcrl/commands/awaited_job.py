"""A short job that a command waits for: its result is a file, and its scheduler is asked seldom.

Invariant: the scheduler is asked at most once in ASK seconds: many users who wait for a quarter of an hour each are no
load to it.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.commands.find_run import ASK
from hpcrl.launch.scheduler import Scheduler
from hpcrl.run.queued_job import JobKey, QueuedJob
from hpcrl.toolbox.signs import LastSign

LATE = 10.0  #: seconds that a shared file system may take to show a file of a job that has ended


class AwaitedJob:
    """What is known of the job.

    Args:
        ask: asks the scheduler for its word on the job; None: it does not say.
    """

    def __init__(self, ask: Callable[[], QueuedJob | None], last: Callable[[], LastSign] = LastSign) -> None:
        self._ask = ask
        self._asked = last()
        self._ended: LastSign | None = None
        self._last = last
        self.word: QueuedJob | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended so long ago that its files would have shown."""
        if self._ended is None and self._asked.due(ASK):
            self.word = self._ask() or self.word
            if self.word and self.word.phase in ("ended", "gone"):
                self._ended = self._last()
        return self._ended is not None and self._ended.silence > LATE

    def state(self) -> str:
        """The scheduler's last word, "" if it gave none."""
        return " ".join(filter(None, (self.word.word, self.word.reason))) if self.word else ""


def asker(scheduler: Scheduler, job: JobKey) -> Callable[[], QueuedJob | None]:
    """What an `AwaitedJob` of this scheduler asks."""
    return lambda: scheduler.look([job]).jobs.get(job)
