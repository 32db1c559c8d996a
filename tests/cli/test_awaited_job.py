"""How often a scheduler is asked about a job that a command waits for, and when the wait is over."""

from __future__ import annotations

import pytest

from hpcrl.cli import awaited_job
from hpcrl.cli.find_run import ASK
from hpcrl.run.queued_job import JobKey, QueueAnswer, QueuedJob
from hpcrl.utils.waiting import LastSign


def test_the_scheduler_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an hour of looks once a second makes 60 questions; an end is believed when it is said twice."""
    now = 0.0
    asked: list[float] = []

    def ask(jobs: list[JobKey]) -> QueueAnswer:
        asked.append(now)
        if now in (15, 30):
            return QueueAnswer(note="squeue: no answer")
        ended = now == 600 or now >= 900  # the first is a mistake
        word = QueuedJob("gone", "GONE") if ended else QueuedJob("pending", "PENDING", "Priority")
        return QueueAnswer({jobs[0]: word})

    monkeypatch.setattr(awaited_job, "query_jobs", ask)
    monkeypatch.setattr(awaited_job, "LastSign", lambda: LastSign(clock=lambda: now))
    awaited = awaited_job.AwaitedJob(JobKey("7", "", 0.0))
    over, states = None, {}
    for second in range(1000):
        now = float(second)
        if awaited.over:
            over = now
            break
        states[now] = awaited.state()
    assert over == 915 and asked == [ASK * number for number in range(1, 62)]
    assert (states[14], states[16], states[46], states[601]) == ("", "squeue: no answer", "PENDING Priority", "GONE")
