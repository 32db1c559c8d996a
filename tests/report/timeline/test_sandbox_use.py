"""The line of a run's sandboxes in its status, and their hours in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.report.sandbox_line import sandbox_line
from hpcrl.report.timeline.reading import Span, Track, trace
from hpcrl.report.timeline.sandbox_use import sandbox_hours, sandbox_use
from hpcrl.report.timeline.spans import SANDBOXES, SANDBOXES_NOW, Header, launcher_timeline, role_timeline
from hpcrl.run.rundir import RunDir
from tests.support.rundirs import begin, log, make

ROWS = [
    {"rollout_id": 3, "train/loss": 0.0, "sandbox/used": 3.0, "sandbox/failures/memory": 2.0},
    {
        "rollout_id": 4,
        "train/loss": 0.0,
        "sandbox/used": 2.25,
        "sandbox/warm": 4.0,
        "sandbox/making": 0.04,
        "sandbox/wait_time": 0.012,
        "sandbox/failures/memory": 1.0,
        "sandbox/failures/lost": 1.0,
    },
]


def track(attempt: int, *marks: dict[str, float]) -> Track:
    header = Header(role="rollout", index=0, host="a", pid=1, opened=0)
    return Track(header, attempt, [Span(SANDBOXES, n, n, more) for n, more in enumerate(marks)])


def test_the_last_step_and_all_failures() -> None:
    line = sandbox_line(ROWS)
    assert line.startswith("2.2 in use, 4.0 warm, 0.0 being made; 0.012 s until")
    assert line.endswith("failures: 3 memory, 1 lost since step 3")
    assert "failures" not in sandbox_line([{"rollout_id": 0, "train/loss": 0.0, "sandbox/used": 1.0}])
    assert sandbox_line([{"rollout_id": 0, "train/loss": 0.0}]) == sandbox_line([]) == ""


def test_every_attempt_counts_once() -> None:
    """A mark has all since the start of its process, so the last counts."""
    found = sandbox_use(
        [
            track(0, {"used": 100.0, "warm": 50.0}, {"used": 3600.0, "warm": 900.0, "handed_out": 7}),
            track(1, {"used": 3600.0, "lost": 2, "waited": 36.0}),
        ]
    )
    assert found == {"used": 7200.0, "warm": 900.0, "handed_out": 7.0, "lost": 2.0, "waited": 36.0}
    line = sandbox_hours(found)
    assert line.startswith("sandbox-hours: 2.0000 in use, 0.2500 made ahead and idle (11.1 %")
    assert "7 handed out" in line and "0.0100 hours" in line and line.endswith("failures: 2 lost")
    assert sandbox_hours({}) == "" and sandbox_use([track(0)]) == {}


def test_report_trace_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They show sandboxes where there were any, and else say nothing of them."""
    root = make(tmp_path / "run")
    begin(root, start=0)
    launcher_timeline(root).close()
    timeline = role_timeline(RunDir(root, 0), "rollout", 0, "a")

    def said(*argv: str) -> str:
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    assert "sandbox" not in said("report", str(root), "-o", "-") + said("status", str(root))
    timeline.count(SANDBOXES_NOW, used=2, warm=1, making=0)
    timeline.mark(SANDBOXES, policy="", used=7200.0, warm=60.0, handed_out=3)
    log(root, *(row | {"time": 1.0} for row in ROWS))
    assert "sandbox-hours: 2.0000 in use" in said("report", str(root), "-o", "-")
    assert "sandboxes   2.2 in use, 4.0 warm" in said("status", str(root))
    from hpcrl.report.timeline.reading import read_stage

    events = trace(read_stage(root), "run")["traceEvents"]
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("sandboxes", {"used": 2, "warm": 1, "making": 0})
