"""What worker processes report of their sandboxes, added up over processes and rollouts."""

from __future__ import annotations

import pytest

from hpcrl.rollout import sandbox_tally
from hpcrl.rollout.sandbox_tally import SandboxMeasures, SandboxTally
from hpcrl.rollout.worker_messages import SandboxReport


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(sandbox_tally.time, "monotonic", lambda: now[0])
    return now


def report(used: int = 0, warm: int = 0, making: int = 0, **more: float) -> SandboxReport:
    return SandboxReport({"used": used, "warm": warm, "making": making}, more)


def test_a_run_without_sandboxes_measures_nothing(clock: list[float]) -> None:
    measures = SandboxMeasures([SandboxTally(), SandboxTally()])
    clock[0] += 10
    assert measures.measures() == {} and measures.totals() == {}
    assert measures.states() == {"used": 0, "warm": 0, "making": 0}


def test_processes_together_and_rollouts_apart(clock: list[float]) -> None:
    """What a killed process had done stays, its boxes go; the next rollout counts what is new alone."""
    custom, grading = SandboxTally(), SandboxTally()
    measures = SandboxMeasures([custom, grading])
    custom.add_report("a", report(used=2, warm=1, made=3, handed_out=2, waited=0.5, seconds=4.0))
    custom.add_report("b", report(used=1, making=1, made=1, handed_out=1, seconds=1.0, memory=2))
    grading.add_report("c", report(warm=2, made=2, handed_out=1, waited=0.7, lost=1))
    assert measures.states() == {"used": 3, "warm": 3, "making": 1}
    clock[0] += 5
    custom.forget("b")
    assert measures.states() == {"used": 2, "warm": 3, "making": 0}
    clock[0] += 5
    found = measures.measures()
    assert found == pytest.approx(
        {
            "sandbox/used": 0.5,
            "sandbox/warm": 3.0,
            "sandbox/making": 0.5,
            "sandbox/made": 6,
            "sandbox/handed_out": 4,
            "sandbox/seconds": 5.0,
            "sandbox/idle_seconds": 30.0,
            "sandbox/wait_time": 0.3,
            "sandbox/failures": 3,
            "sandbox/failures/lost": 1,
            "sandbox/failures/memory": 2,
        }
    )
    custom.add_report("a", report(used=1, handed_out=1, waited=0.1, seconds=3.0))
    clock[0] += 2
    found = measures.measures()
    assert (found["sandbox/used"], found["sandbox/handed_out"]) == (1.5, 1)
    assert found["sandbox/wait_time"] == pytest.approx(0.1) and found["sandbox/failures/memory"] == 0
    totals = measures.totals()
    assert (totals["used"], totals["waited"], totals["memory"]) == (8.0, pytest.approx(1.3), 2.0)
    assert "seconds" not in totals
