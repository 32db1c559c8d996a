"""What state.json says of attempts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hpcrl.config.recipe import Stage
from hpcrl.errors import PeerError
from hpcrl.launch.attempts.monitoring import observe
from hpcrl.report.timeline.spans import Timeline
from hpcrl.run.job_files import JobStateFile
from hpcrl.run.rundir import RunDir


def test_after_a_failure_nothing_is_said_to_run(tmp_path: Path) -> None:
    """Until the next attempt, state.json says which attempt failed, and not that the run is at work."""
    state = JobStateFile(tmp_path)
    told = []
    for attempt in range(2):
        rundir = RunDir(tmp_path, attempt)
        rundir.make_attempt()
        with contextlib.suppress(PeerError), observe(rundir, Stage("", {}), "run", 3, state, Timeline(None)):
            told.append((state.phase, state.state.message))
            state.set("running")
            raise PeerError("engine-0 died")
        told.append((state.phase, state.state.message))
    began, failed, again, _ = told
    assert began == again == ("starting", "")
    assert failed[0] == "starting" and failed[1].startswith("attempt 0 failed")
