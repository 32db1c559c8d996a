"""How often a scheduler is asked about a job that a command waits for, and when the wait is over."""

from __future__ import annotations

from hpcrl.commands.awaited_job import AwaitedJob
from hpcrl.commands.find_run import ASK
from hpcrl.run.queued_job import QueuedJob
from hpcrl.toolbox.signs import LastSign


def test_the_scheduler_is_asked_seldom() -> None:
    """A quarter of an hour of looks once a second makes 60 questions; the end is believed when files had time."""
    now = 0.0
    asked: list[float] = []

    def ask() -> QueuedJob | None:
        asked.append(now)
        if now == 30:
            return None  # it does not answer
        return QueuedJob("ended", "FAILED") if now >= 900 else QueuedJob("pending", "PENDING", "Priority")

    awaited = AwaitedJob(ask, lambda: LastSign(clock=lambda: now))
    over = None
    for second in range(1000):
        now = float(second)
        if awaited.over:
            over = now
            break
        assert awaited.state() == ("" if now < ASK else "PENDING Priority" if now < 900 else "FAILED")
    assert len(asked) == 900 / ASK and asked[-1] == 900 and over == 911
