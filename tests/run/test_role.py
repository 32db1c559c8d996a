"""What a role reads before it begins, and how it says that it cannot."""

from __future__ import annotations

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch import probe
from hpcrl.plan import Location, Plan
from hpcrl.run.role import act, open_role, read_plan
from hpcrl.run.rundir import RunDir

PLAN = Plan("run", 0, (Location("a", (0,)),), (), Location("a", ()))


@pytest.fixture
def rundir(rundir: RunDir) -> RunDir:
    rundir.options_file.write_text(Options().model_dump_json())
    return rundir


def test_a_role_finds_its_place(rundir: RunDir) -> None:
    rundir.plan_file.write_bytes(msgspec.json.encode(PLAN))
    context = open_role([str(rundir.root), "--attempt", "0", "--index", "3"])
    assert (context.plan, context.index, context.rundir.here) == (PLAN, 3, rundir.here)


@pytest.mark.parametrize("damage", [None, b"", b"\xff", b"[]", b'{"run_id": "run"}'])
def test_a_plan_that_is_none_is_named(rundir: RunDir, damage: bytes | None) -> None:
    if damage is not None:
        rundir.plan_file.write_bytes(damage)
    match = r"plan\.json is missing" if damage is None else r"plan\.json is damaged"
    with pytest.raises(HpcrlError, match=match):
        read_plan(rundir)
    with pytest.raises(SystemExit, match=f"error: .*{match}"):
        open_role([str(rundir.root), "--attempt", "0"])


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"host": "a", "pid": 1}'])
def test_a_hosts_report_that_is_none_is_named(rundir: RunDir, damage: bytes) -> None:
    probe.write(rundir, "a")
    assert probe.gather(rundir, ["a"], 5)["a"].host == "a"
    (rundir.here / "hosts" / "b.json").write_bytes(damage)
    with pytest.raises(PeerError, match=r"hosts/b\.json.*damaged, or of another"):
        probe.gather(rundir, ["a", "b"], 5)


def test_an_error_is_told_by_its_cause(rundir: RunDir) -> None:
    """NCCL says first where it is, and last what is wrong."""

    def body() -> None:
        raise RuntimeError("NCCL error in: x.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")

    rundir.plan_file.write_bytes(msgspec.json.encode(PLAN))
    context = open_role([str(rundir.root), "--attempt", "0"])
    assert act("trainer", context, 0, body) == 1
    assert rundir.failure().message == "RuntimeError: Cuda failure 2 'out of memory'"
