"""A short job that a command waits for: its result is a file, and Slurm is asked seldom.

Invariant: Slurm is asked at most once in ASK seconds: many users who wait for a quarter of an hour each are no
load to it.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.cli.find_run import ASK
from hpcrl.launch.slurm.jobs import query_jobs
from hpcrl.run.queued_job import JobKey, QueuedJob
from hpcrl.utils.liveness import LastSign

Answer = tuple[QueuedJob | None, str]


class AwaitedJob:
    """What is known of the job.

    Args:
        ask: asks Slurm: (its word on the job, None if it does not say; why it does not).
    """

    def __init__(self, ask: Callable[[], Answer], last: Callable[[], LastSign] = LastSign) -> None:
        self._ask = ask
        self._asked = last()
        self._ended = 0
        self.word: QueuedJob | None = None
        self.note = ""

    @property
    def over(self) -> bool:
        """Whether it has ended, as two answers one after the other have it: the first may be a mistake, and the files
        of a job that has ended have time to show."""
        if self._ended < 2 and self._asked.due(ASK):
            word, self.note = self._ask()
            self.word = word or self.word
            self._ended = self._ended + 1 if word and word.phase in ("ended", "gone") else 0
        return self._ended > 1

    def state(self) -> str:
        """Slurm's last word, or why it gives none."""
        return " ".join(filter(None, (self.word.word, self.word.reason))) if self.word else self.note


def asker(job: JobKey) -> Callable[[], Answer]:
    """What an `AwaitedJob` asks."""

    def ask() -> Answer:
        answer = query_jobs([job])
        return answer.jobs.get(job), answer.note

    return ask
