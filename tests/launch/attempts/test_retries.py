"""When a stage that has failed is tried again on the hosts of its job, and what it takes over then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import EXITED, UNEXPECTED
from hpcrl.launch.attempts.host_processes import HeldHosts
from hpcrl.launch.attempts.retries import FailedAttempt, reason_to_end
from hpcrl.launch.attempts.spare_hosts import mark_spares, replacement, without
from hpcrl.plan import Host, make_plan
from hpcrl.run.pauses import CarriedOver, PausedHost, carried_over, follow_log, hand_over, read_carried, tell_paused
from hpcrl.run.peers import EnginePeer, find, publish
from hpcrl.run.rundir import BEATS, AttemptFailure, RunDir, write_atomic


def failed(
    message: str = "killed", kind: str = "", step: int = 3, trained: bool = True, role: str = "trainer"
) -> FailedAttempt:
    return FailedAttempt(AttemptFailure(role, 0, message, 0.0, kind), step, trained)


@pytest.mark.parametrize(
    ("attempts", "limit", "said"),
    [
        ([failed()], 4, ""),
        ([failed(trained=False)], 4, ""),
        ([FailedAttempt(None, 3, True)], 4, ""),
        ([failed(kind="UsageError")], 4, "settings, data and code"),
        ([failed(kind="DataError")], 4, "settings, data and code"),
        ([failed(kind="CodeError", role="rollout")], 4, "settings, data and code"),
        ([failed(kind="PeerError", trained=False)], 4, ""),
        ([failed(kind=EXITED, trained=False)], 4, "not begun to train"),
        ([failed(kind=UNEXPECTED, trained=False)], 4, "not begun to train"),
        ([failed(), failed(kind=EXITED, trained=False)], 4, ""),
        ([failed("loss is nan", UNEXPECTED)], 4, ""),
        ([failed("loss is nan", UNEXPECTED), failed("loss is nan", UNEXPECTED)], 4, "failed so at step 3"),
        ([failed("at 0x7f of 12 MiB", UNEXPECTED), failed("at 0x80 of 13.5 MiB", UNEXPECTED)], 4, "at step 3"),
        ([failed("loss is nan", UNEXPECTED), failed("loss is nan", UNEXPECTED, step=4)], 4, ""),
        ([failed("loss is nan", UNEXPECTED), failed("out of memory", UNEXPECTED)], 4, ""),
        ([failed("x", UNEXPECTED), failed("x", UNEXPECTED, role="rollout")], 4, ""),
        ([failed("x", UNEXPECTED), failed(step=5), failed("x", UNEXPECTED)], 4, "at step 3"),
        ([failed(), failed()], 4, ""),
        ([failed("at 0x7f", "")] * 2, 4, ""),
        ([failed("at 0x7f", "")] * 3, 9, "at step 3"),
        ([failed(step=n) for n in range(4)], 4, "--attempts 4"),
        ([failed(step=n) for n in range(9)], 10, ""),
        ([failed()], 1, "--attempts 1"),
    ],
)
def test_what_another_attempt_cannot_get_over(attempts: list[FailedAttempt], limit: int, said: str) -> None:
    """A setting, an error before the first step, the same error at the same step; the number is a limit."""
    why = reason_to_end(attempts, limit, len(attempts))
    assert said in why and bool(said) == bool(why)


OPTIONS = Options(hf_checkpoint="m", actor_num_gpus_per_node=1, rollout_num_gpus=6, rollout_num_gpus_per_engine=2)
#: engine 0 on host a, engine 1 on d, engine 2 over b and c
PLAN = make_plan(OPTIONS, [Host("t", 1), Host("a", 2), Host("b", 1), Host("c", 1), Host("d", 2)], "run")


def test_whole_engines_are_taken_over() -> None:
    """One that has lost a part begins again, with a key that no process had; without any, all is new."""
    assert [engine.hosts for engine in PLAN.engines] == [("a",), ("d",), ("b", "c")]
    a = PausedHost(engines={0: 2}, last={0: 2})
    b, c = PausedHost(engines={2: 0}, last={2: 0}), PausedHost(parts=[(2, 1)])
    d = PausedHost(last={1: 1})
    assert carried_over(PLAN, PLAN, [a, b, c, d]) == CarriedOver(engines={0: 2, 2: 0}, begin={1: 2})
    assert carried_over(PLAN, PLAN, [a, b, PausedHost(), d]) == CarriedOver(engines={0: 2}, begin={1: 2, 2: 1})
    assert carried_over(PLAN, PLAN, [PausedHost(last={0: 2}), PausedHost(last={2: 0}), c, d]) == CarriedOver()
    assert carried_over(PLAN, PLAN, [PausedHost(engines={9: 0}, last={9: 0})]) == CarriedOver(), "of another job"


def test_an_engine_is_found_where_it_was(rundir: RunDir) -> None:
    """Address, process and incarnation are those of the attempt before."""
    publish(rundir, EnginePeer(host="a", port=4711, incarnation=0), 0)
    publish(rundir, EnginePeer(host="d", port=4712, incarnation=0), 2)
    later = RunDir(rundir.root, rundir.attempt + 1)
    later.make_attempt()
    hand_over(rundir, later, CarriedOver(engines={0: 0}, begin={2: 1}))
    assert find(later, EnginePeer, 0) == find(rundir, EnginePeer, 0) and find(later, EnginePeer, 2) is None
    assert read_carried(later) == CarriedOver(engines={0: 0}, begin={2: 1}) and read_carried(rundir) == CarriedOver()


def test_a_new_checkpoint_counts_anew() -> None:
    """A fault a day ends no job of a week."""
    assert reason_to_end([failed(step=n) for n in range(9)], 4, 1) == ""


def member(status: int | None = None, lost: str = "", without: str = "", expendable: str = "") -> Any:
    return SimpleNamespace(
        status=status, lost=lambda: lost, lives_without=lambda: frozenset(without), expendable=expendable
    )


@pytest.mark.parametrize(
    ("members", "hosts", "waits"),
    [
        ([member(), member()], "tabcd", True),
        ([member(), member()], "tabc", False),
        ([member(), member(1)], "tabcd", False),
        ([member(), member(lost="host b: its process died")], "tabcd", False),
        ([member(), member(lost="Node failure on d", without="d")], "tabc", False),
        ([member(), member(1, expendable="d")], "tabc", True),
        ([member(), member(expendable="d")], "tabc", True),
        ([member(1), member(expendable="d")], "tabc", False),
        ([], "tabcd", False),
    ],
)
def test_hosts_that_all_wait_are_held(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, members: list[Any], hosts: str, waits: bool
) -> None:
    """Each of the plan, and each that has given a sign of life, has to say that it waits, and none may have ended."""
    monkeypatch.setattr("hpcrl.launch.attempts.host_processes.PAUSING", 0.3)
    write_atomic(rundir.plan_file, b"")
    monkeypatch.setattr("hpcrl.launch.attempts.host_processes.read_plan", lambda _: PLAN)
    (rundir.here / BEATS).mkdir()
    for name in ("a", "b", ".b"):
        (rundir.here / BEATS / name).touch()
    for name in hosts:
        tell_paused(rundir, name, PausedHost(engines={0: 0} if name == "a" else {}, last={0: 0}))
    held = HeldHosts(hosts=[Host(name, 1) for name in "tabcd"], members=members)
    assert held.pause(rundir, lambda: None) is waits
    assert (held.absent == set()) is waits
    if waits:
        held.carry(PLAN)
    assert dict(held.engines) == ({0: 0} if waits else {})
    if waits:
        held.carry(PLAN, engines=False)
        assert held.carried == CarriedOver(), "new settings"


def test_engines_stay_where_a_spare_host_takes_a_place(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the lost host is absent, for which nobody waits; the engine that was there begins again on the other one."""
    write_atomic(rundir.plan_file, msgspec.json.encode(PLAN))
    (rundir.here / BEATS).mkdir()
    for name in "tabcde":
        (rundir.here / BEATS / name).touch()
        if name != "d":
            engines = {"a": {0: 0}, "b": {2: 0}}.get(name, {})
            parts = [(2, 1)] if name == "c" else []
            tell_paused(rundir, name, PausedHost(engines=engines, parts=parts, last=engines))
    hosts = [Host("t", 1), Host("a", 2), Host("b", 1), Host("c", 1), Host("d", 2), Host("e", 2, spare=True)]
    held = HeldHosts(hosts=hosts, members=[member(lost="Node failure on d", without="d")])
    monkeypatch.setattr("hpcrl.launch.attempts.host_processes.PAUSING", 30.0)
    assert not held.pause(rundir, lambda: None) and held.absent == {"d"}
    held.hosts = without(hosts, ["d"])
    held.carry(make_plan(OPTIONS, held.hosts, "run", 1))
    assert held.carried == CarriedOver(engines={0: 0, 2: 0}, begin={1: 65537}), "a key that the lost host never had"


def test_hosts_that_take_places() -> None:
    """In order, the same size before a larger one, with as many slots; a spare that is lost takes none."""
    a, b, small, large = Host("a", 2), Host("b", 4), Host("s", 2, "10.0.0.3", spare=True), Host("l", 4, spare=True)
    hosts = [a, b, large, small]
    assert without(hosts, ["a"]) == [Host("s", 2, "10.0.0.3"), b, large]
    assert without(hosts, ["a", "s"]) == [Host("l", 2), b]
    assert without(hosts, ["s", "a"]) == [Host("l", 2), b], "a lost one takes no place"
    assert without(hosts, ["b", "a"]) == [Host("s", 2, "10.0.0.3"), Host("l", 4)]
    assert without([a, b, small], ["b"]) == [a, small], "it is too small"
    assert without(hosts, []) == hosts and replacement(hosts, "l") is None and replacement(hosts, "x") is None
    assert [h.spare for h in mark_spares([a, b, Host("r", 0)], 1)] == [False, True, False]


def test_a_log_follows_its_process(tmp_path: Path) -> None:
    """What it writes next is in the new place, and what it wrote before."""
    old, new = tmp_path / "attempt-0", tmp_path / "attempt-1"
    old.mkdir()
    new.mkdir()
    with (old / "engine-0.log").open("w") as log:
        log.write("up\n")
        log.flush()
        found = follow_log(old / "engine-0.log", new)
        log.write("still up\n")
    (old / "engine-0.log").unlink()
    assert found.read_text() == "up\nstill up\n"
