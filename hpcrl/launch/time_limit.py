"""The time limit of a Slurm job, and a preemption, which is one: when a run is asked to save and end.

Invariant: what is kept for saving is what the run's own steps and saves have taken, and never less than the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.launch.requeue import margin
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.run.rundir import RunDir

LOOK = 5.0  #: seconds between two looks at how much time is left
RETREAT = 20.0  #: seconds before the time limit that an attempt which does not save in time is ended


@dataclass
class TimeLimitWatcher:
    """Asks the run to save and end before the job's time limit, by what its own steps have taken.

    The scheduler's SIGUSR1 may come a minute early, or because the limit was changed: it makes us look again, and
    decides only where the limit has never been known. A limit may be raised without a signal: before the run is asked
    to end, the scheduler is asked once more. Where it does not answer, what it said last holds.

    A preemption with a grace time is such a limit, too.

    Attributes:
        limit: asks the scheduler.
        floor: seconds that are always kept for saving.
        preempted: asks the scheduler whether it wants the nodes for another job.
        due: whether it has asked.
    """

    limit: Callable[[], float | None]
    floor: float
    preempted: Callable[[], bool] = lambda: False
    ends: float | None = None
    due: bool = False
    next_look: float = 0.0

    def __post_init__(self) -> None:
        self.ends = self.limit()

    def watch(self, stop: StopRequest, rundir: RunDir | None) -> None:
        now, nudged = time.time(), stop.nudges > 0
        if now < self.next_look and not nudged:
            return
        stop.nudges = 0
        self.next_look = now + LOOK
        needed = margin(rundir, self.floor) if rundir else self.floor
        if nudged or (self._near(now, needed) and not self.due):
            self.ends = self.limit() or self.ends
        if (self.ends is None and nudged) or self._near(now, needed):
            self.due = self.due or not stop.requests
            if not stop.requests:
                why = "preempted, the grace time is running" if self.preempted() else "the time limit is near"
                stop.request_stop(why, needed if self.ends is None else _before(self.ends - now))

    def _near(self, now: float, needed: float) -> bool:
        return self.ends is not None and now > self.ends - needed


def _before(left: float) -> float:
    """Seconds that a run may take to save, of those that are `left`: enough remains to end it ourselves, and queue the
    job again, before the scheduler ends it all for good."""
    return max(left - RETREAT, left / 2, 1.0)
