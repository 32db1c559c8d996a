"""The line of a run's sandboxes in its status and its report, and their counter in its trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.report.run_status import sandbox_line
from hpcrl.report.timeline.reading import read_stage, trace
from hpcrl.report.timeline.spans import SANDBOXES_NOW, launcher_timeline, role_timeline
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


def test_the_last_step_and_all_failures() -> None:
    line = sandbox_line(ROWS)
    assert line.startswith("2.2 in use, 4.0 warm, 0.0 being made; 0.012 s until")
    assert line.endswith("failures: 3 memory, 1 lost since step 3")
    assert "failures" not in sandbox_line([{"rollout_id": 0, "train/loss": 0.0, "sandbox/used": 1.0}])
    assert sandbox_line([{"rollout_id": 0, "train/loss": 0.0}]) == sandbox_line([]) == ""


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
    log(root, *(row | {"time": 1.0} for row in ROWS))
    assert "<th>sandboxes</th><td>2.2 in use, 4.0 warm" in said("report", str(root), "-o", "-")
    assert "sandboxes   2.2 in use, 4.0 warm" in said("status", str(root))
    events = trace(read_stage(root), "run")["traceEvents"]
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["name"], counter["args"]) == ("sandboxes", {"used": 2, "warm": 1, "making": 0})
