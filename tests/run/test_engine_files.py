"""What supervisors say of engines: files written once, read once, and the rule of who starts again."""

from __future__ import annotations

import pytest

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.run.engine_files import (
    VIEW,
    EngineReports,
    EngineView,
    end_of,
    final_error,
    read_views,
    record_end,
    starts_again,
    was_up,
    write_views,
)
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir


def peer(incarnation: int) -> EnginePeer:
    return EnginePeer(host="127.0.0.1", port=7 + incarnation, incarnation=incarnation)


@pytest.mark.parametrize(
    ("limit", "incarnation", "up", "again"),
    [
        (2, 0, True, True),
        (2, 1, True, True),
        (2, 2, True, False),
        (0, 0, True, False),
        (2, 0, False, False),
        (2, 1, False, True),
    ],
)
def test_who_starts_again(limit: int, incarnation: int, up: bool, again: bool) -> None:
    assert starts_again(limit, incarnation, up) == again


def test_reports_come_once_and_in_order(rundir: RunDir) -> None:
    reports = EngineReports(rundir)
    assert reports.new() == []
    publish(rundir, peer(0), 3)
    assert record_end(rundir, 3, "a", 0, 2, True, "killed")
    publish(rundir, peer(1), 3)
    publish(rundir, peer(0), 12)
    found = [(index, type(said).__name__, said.incarnation) for index, said in reports.new()]
    assert found.index((3, "EnginePeer", 0)) < found.index((3, "EngineEnd", 0)) < found.index((3, "EnginePeer", 1))
    assert (12, "EnginePeer", 0) in found and len(found) == 4 and reports.new() == []
    assert was_up(rundir, 3, 1) and not was_up(rundir, 3, 2)
    assert record_end(rundir, 3, "a", 0, 2, True, "a later word") and end_of(rundir, 3, 0).why == "killed", (
        "the first word stays"
    )


def test_last_end_is_the_error(rundir: RunDir) -> None:
    """The last end is the attempt's error and names the first."""
    for incarnation, why in enumerate(["out of memory", "hangs"]):
        assert record_end(rundir, 0, "a", incarnation, 2, True, why)
    assert rundir.failure() is None
    assert not record_end(rundir, 0, "a", 2, 2, True, "killed")
    wanted = "out of memory; it was started again 2 times (--attempts), and at last: killed"
    assert rundir.failure().message == wanted
    assert final_error([], "killed") == "killed"


def test_what_is_no_report_is_named(rundir: RunDir) -> None:
    (rundir.here / "peers" / "engine-0.1.json").write_bytes(b'{"role":"store","host":"x"}')
    with pytest.raises(PeerError, match=r"engine-0\.1\.json is damaged"):
        EngineReports(rundir).new()


def test_the_view_from_outside(rundir: RunDir) -> None:
    assert read_views(rundir.here) is None
    one = EngineView(index=0, host="a", state="serving", version=3, requests=2, restarts=1)
    write_views(rundir, 3, [one])
    assert read_views(rundir.here).engines == [one] and read_views(rundir.here).published == 3
    (rundir.here / VIEW).write_bytes(b"{")
    with pytest.raises(HpcrlError, match="is damaged"):
        read_views(rundir.here)
