"""state.json: one definition for the launcher that writes it and for those who look."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.errors import HpcrlError, Stopped
from hpcrl.report.run_files import Run
from hpcrl.run import job_files
from hpcrl.run.job_files import STATE, JobStateFile


@pytest.mark.parametrize(
    ("error", "phase", "message"),
    [
        (None, "finished", ""),
        (Stopped("saved"), "stopped", "saved"),
        (HpcrlError("broken", "mend"), "failed", "broken; mend"),
    ],
)
def test_what_the_launcher_writes_is_what_others_read(
    tmp_path: Path, error: HpcrlError | None, phase: str, message: str
) -> None:
    try:
        with JobStateFile(tmp_path, restarts=2, ends=9.5) as file:
            file.set("running", stage="sft", attempt=3)
            working = Run(tmp_path).state
            if error:
                raise error
    except HpcrlError:
        pass
    assert (working.phase, working.stage, working.attempt, working.restarts, working.ends) == (
        "running",
        "sft",
        3,
        2,
        9.5,
    )
    assert abs(working.time - time.time()) < 60 and working.pid and working.host
    ended = Run(tmp_path).state
    assert (ended.phase, ended.message, ended.stage, ended.attempt) == (phase, message, "sft", 3)


def test_a_beat_writes_only_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JobStateFile(tmp_path)
    file.set("running")
    before = (tmp_path / STATE).stat().st_ino
    file.beat()
    assert (tmp_path / STATE).stat().st_ino == before
    file.beat("saving")
    assert Run(tmp_path).state.phase == "saving"
    monkeypatch.setattr(job_files, "BEAT", 0.0)
    last = Run(tmp_path).state.time
    file.beat()
    assert Run(tmp_path).state.time > last


def test_a_phase_that_nobody_knows_is_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(msgspec.json.encode({"phase": "dreaming", "time": 1.0}))
    run = Run(tmp_path)
    assert run.state is None and any("state.json is damaged" in note for note in run.notes)
