"""What a host asks of the run directory that all hosts share, and what it makes of the answers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.launch import host, probe, restarters, roles
from hpcrl.launch.attempts import run_dir_poller
from hpcrl.launch.attempts.run_dir_poller import RunDirPoller
from hpcrl.launch.host import HostRoles
from hpcrl.plan import Host, make_plan
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir, listed
from hpcrl.run.summary import Summary, write_summary
from hpcrl.utils import waiting


class TimeLimitWatcher:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_host_asks_about_once_a_second(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where the calls are made, its engines' keeper and its signs of life (two calls each) among them."""
    clock, asked = TimeLimitWatcher(), []
    listdir, read = os.listdir, Path.read_bytes
    monkeypatch.setattr(run_dir_poller, "time", clock)
    monkeypatch.setattr(os, "listdir", lambda path: asked.append(path) or listdir(path))
    monkeypatch.setattr(Path, "read_bytes", lambda path: asked.append(path) or read(path))
    monkeypatch.setattr(restarters, "time", clock)
    looks, seconds = RunDirPoller(rundir), 600
    engines = restarters.EngineRestarter(rundir, "a", 2, {0: []}, lambda *_: None)
    for _ in range(seconds * 5):
        assert not looks.must_end() and not looks.over(at_once=False)
        engines.restart_ended([])
        clock.sleep(0.2)
    assert seconds / 4 < len(asked) and len(asked) + 2 * seconds / host.HOST_BEAT <= seconds


def test_end_mark_of_its_own_attempt(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host knows that the run is over by the mark of its own attempt."""
    clock = TimeLimitWatcher()
    monkeypatch.setattr(run_dir_poller, "time", clock)
    looks = RunDirPoller(rundir)
    write_summary(rundir.root, Summary("stopped", rundir.attempt + 1))
    assert not looks.over(at_once=True), "an attempt that has no directory here"
    write_summary(rundir.root, Summary("finished", rundir.attempt))
    assert not looks.over(at_once=False) and looks.over(at_once=True)


def test_end_when_told_or_superseded(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host ends when it is told to, and when the run continues without it."""
    clock = TimeLimitWatcher()
    monkeypatch.setattr(run_dir_poller, "time", clock)
    told, left = RunDirPoller(rundir), RunDirPoller(rundir)
    assert not told.must_end()
    rundir.request_end()
    assert not told.must_end(), "it looks every two seconds"
    clock.sleep(run_dir_poller.EVERY)
    assert told.must_end()
    (rundir.here / "end").unlink()
    RunDir(rundir.root, 1).make_attempt()
    for _ in range(run_dir_poller.SELDOM):
        ended = left.must_end()
        clock.sleep(run_dir_poller.EVERY)
    assert ended
    rundir.fail("engine", 3, "no memory")
    with pytest.raises(PeerError, match="engine-3: no memory"):
        left.must_end()


def test_the_last_report_at_the_deadline_counts(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TimeLimitWatcher()
    monkeypatch.setattr(waiting, "time", clock)
    probe.write(rundir, "node1")

    def last() -> None:
        """Within the last look the clock passes the deadline, and the report comes."""
        clock.sleep(899.95)
        probe.write(rundir, "node2")

    assert set(probe.gather(rundir, ["node1", "node2"], 900.0, last)) == {"node1", "node2"}
    with pytest.raises(DeadlineError, match="no answer from node3 within"):
        probe.gather(rundir, ["node1", "node3"], 5.0)


def test_names_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert listed(tmp_path / "none") == frozenset()
    (tmp_path / "a").touch()
    assert listed(tmp_path) == {"a"}


def test_multi_node_engine_starts_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of an engine over several hosts is started on its host."""
    options = Options(hf_checkpoint="m", actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
    plan = make_plan(options, [Host("t", 2), Host("a", 2), Host("b", 2)], "run")

    def on(name: str, slot: int | None = None) -> list[tuple[str, int]]:
        return [(role, index) for role, index, _ in roles.commands(options, plan, RunDir("/nowhere"), name, slot)]

    assert on("a") == [("engine", 0), ("rollout", 0)]
    assert on("b") == on("b", 0) == [("engine-0-node", 1)] and on("b", 1) == []
    [(role, index, command)] = roles.commands(options, plan, RunDir("/nowhere"), "b")
    assert command[2] == "hpcrl.engine.follower" and command[-4:] == ["--index", "0", "--node", "1"]
    assert roles.devices(plan, role, index, "b", None, "4,5") == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("HPCRL_ON_CPUS", "1")
    assert roles.devices(plan, role, index, "b", None, "4,5") == {"CUDA_VISIBLE_DEVICES": ""}
    assert roles.devices(plan, role, index, "b", None, None) == {"CUDA_VISIBLE_DEVICES": ""}
    later = make_plan(options, [Host("t", 4), Host("a", 2), Host("b", 2)], "run")
    assert later.engines[0].hosts == ("a", "b"), "whole hosts next to each other"
    assert roles.Role("engine-0-node", 1, None, Path()).serves and not roles.Role("trainer", 1, None, Path()).serves  # type: ignore[arg-type]


@pytest.mark.parametrize("failed", [0, 1])
def test_failed_engine_is_not_kept(rundir: RunDir, failed: int) -> None:
    """Nor any part of it, be its process there for a moment still; the other engines are kept."""
    options = SimpleNamespace(takes_turns=False)
    keeper = SimpleNamespace(rundir=rundir, options=options, _restarter=SimpleNamespace(incarnations={0: 0, 1: 0}))
    for index in (0, 1):
        publish(rundir, EnginePeer(host="a", port=8000 + index), index)
    whole = [SimpleNamespace(name="engine", index=index, engine=index) for index in (0, 1)]
    parts = [SimpleNamespace(name=f"engine-{index}-node", index=1, engine=index) for index in (0, 1)]
    well = lambda: [HostRoles._well(keeper, role) for role in (*whole, *parts)]  # type: ignore[arg-type]  # noqa: E731
    assert all(well())
    rundir.fail("engine", failed, "it hangs")
    assert well() == [failed != 0, failed != 1] * 2


def test_summary_is_read_once_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system would remember for a minute that it was absent."""
    from hpcrl.run import summary

    rundir = RunDir.create(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(summary, "read_record", lambda *_: pytest.fail("it asked for a file that is not there"))
        assert summary.summary_of(rundir) is None
    summary.write_summary(rundir.root, summary.Summary("finished", rundir.attempt))
    assert summary.summary_of(rundir).finished


@pytest.mark.parametrize("status", [-15, 143])
@pytest.mark.parametrize("told", [0, 1])
def test_role_that_ended_with_its_host(rundir: RunDir, status: int, told: int) -> None:
    """Slurm's signal goes to all processes of a step, and what a role makes of it is its own matter."""
    ended = SimpleNamespace(name="rollout", index=0, status=status, serves=False, exit_report=lambda: "rollout-0 ended")
    with pytest.raises(PeerError, match="host node2 was ended" if told else "rollout-0 ended"):
        host._check([ended], rundir, host.SignalFlags(told), "node2")  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [
        (
            1,
            ["10:00:00 error: cannot write x: the file system is full", "E1123 torch says more"],
            "file system is full",
        ),
        (1, ["10:00:00 error: early", *["line"] * 30], "exit code 1; its log is"),
        (1, ["10:00:00 error: the first", "10:00:00 error: \033[31mthe last"], "it says: the last"),
        (-9, ["10:00:00 error: of an earlier incarnation"], "; its log is"),
        (-6, ["what():  CUDA error: out of memory", "line"], "it says: what():  CUDA"),
    ],
)
def test_error_that_a_role_could_not_record(tmp_path: Path, status: int, lines: list[str], said: str) -> None:
    """On a full disk, which may have room again when its host records that it ended."""
    log = tmp_path / "rollout-0.log"
    log.write_text("".join(f"{line}\n" for line in lines))
    role = roles.Role("rollout", 0, SimpleNamespace(returncode=status), log)  # type: ignore[arg-type]
    assert said in role.exit_report() and ("it says" in role.exit_report()) == ("it says" in said or "full" in said)
