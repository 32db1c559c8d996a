"""Engines that end are started again, as often as they may be, with processes of which nothing is real but their
end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpcrl.launch import restarters
from hpcrl.launch.restarters import EngineRestarter
from hpcrl.run.attempt_log import note_lowered
from hpcrl.run.engine_files import end_of, record_end
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir
from tests.launch.test_host import TimeLimitWatcher


@dataclass
class Fake:
    name: str
    index: int
    command: list[str]
    status: int | None = None

    def exit_report(self) -> str:
        return f"{self.name}-{self.index} ended with {self.status}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TimeLimitWatcher:
    made = TimeLimitWatcher()
    monkeypatch.setattr(restarters, "time", made)
    return made


def test_an_engine_is_started_again_up_to_the_limit(rundir: RunDir, clock: TimeLimitWatcher) -> None:
    restarter = EngineRestarter(rundir, "a", 2, {1: ["run"]}, Fake)
    roles = [Fake("rollout", 0, []), Fake("engine", 1, ["run"])]
    for incarnation in range(3):
        publish(rundir, EnginePeer(host="a", port=1, incarnation=incarnation), 1)
        restarter.restart_ended(roles)
        engine = roles[-1]
        assert engine.command == (["run"] if incarnation == 0 else ["run", "--incarnation", str(incarnation)])
        engine.status = -9
        restarter.restart_ended(roles)
        if incarnation < 2:
            assert [r.name for r in roles] == ["rollout"], "nobody takes its end for the run's"
            assert end_of(rundir, 1, incarnation).why == "engine-1 ended with -9"
            clock.sleep(restarters.PAUSE)
    assert roles[-1].status == -9, "now it counts"


def test_restarts_count_in_each_attempt(rundir: RunDir, clock: TimeLimitWatcher) -> None:
    """An engine that an earlier attempt has started twice may be started as often again in this one; its error names
    this attempt's ends alone."""
    restarter = EngineRestarter(rundir, "a", 1, {1: ["run"]}, Fake, {1: 2})
    roles = [Fake("engine", 1, ["run"], status=-9)]
    publish(rundir, EnginePeer(host="a", port=1, incarnation=2), 1)
    restarter.restart_ended(roles)
    assert not roles and end_of(rundir, 1, 2).again
    clock.sleep(restarters.PAUSE)
    restarter.restart_ended(roles)
    assert roles[0].command == ["run", "--incarnation", "3"]
    roles[0].status = -9
    restarter.restart_ended(roles)
    assert roles[0].status == -9, "now it counts"
    assert not record_end(rundir, 1, "a", 3, 1, True, "hangs", 2)
    assert "again 1 time (" in rundir.failure().message and rundir.failure().message.startswith("engine-1 ended")


def test_an_engine_without_memory_ends_it(rundir: RunDir, clock: TimeLimitWatcher) -> None:
    """The next attempt uses less; where that was done as often as it may be, the engine is started again."""
    full = Fake("engine", 1, ["run"], status=1)
    full.exit_report = lambda: "it says: torch.OutOfMemoryError: CUDA out of memory."  # type: ignore[method-assign]
    publish(rundir, EnginePeer(host="a", port=1, incarnation=0), 1)
    for retries, left in ((1, [full]), (0, [])):
        roles = [full]
        EngineRestarter(rundir, "a", 2, {1: ["run"]}, Fake, oom_retries=retries).restart_ended(roles)
        assert roles == left
    note_lowered(rundir, 3, "max_num_seqs", "less")
    EngineRestarter(rundir, "a", 2, {1: ["run"]}, Fake, oom_retries=1).restart_ended(roles := [full])
    assert roles == []


def test_never_up_is_a_failure(rundir: RunDir, clock: TimeLimitWatcher) -> None:
    """An engine that never came up is a failure; other roles are not the restarter's."""
    restarter = EngineRestarter(rundir, "a", 2, {0: ["run"]}, Fake)
    roles = [Fake("rollout", 0, [], status=1), Fake("engine", 0, ["run"], status=1)]
    restarter.restart_ended(roles)
    clock.sleep(10)
    restarter.restart_ended(roles)
    assert [r.status for r in roles] == [1, 1]
