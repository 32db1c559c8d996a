"""What an answer of scontrol to a requeue means; tests/launch/slurm/test_requeue.py asks a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.launch.allocation import AlreadyRequeued, SchedulerSilent
from hpcrl.launch.slurm.batch_process import SlurmAllocation


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exit 0", None),
        ("kill -TERM $$", None),  # Slurm ends the job's processes to requeue it, and scontrol is one of them
        ("echo 'Job is pending execution for job 7' >&2; exit 1", AlreadyRequeued),
        ("echo 'Requested operation is presently disabled for job 7' >&2; exit 1", HpcrlError),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", SchedulerSilent),
        ("kill -SEGV $$", SchedulerSilent),
    ],
)
def test_answers(script: str, error: type[HpcrlError] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    allocation = SlurmAllocation.__new__(SlurmAllocation)  # its steps are of no matter here
    allocation.job_id = "7"
    if error is None:
        allocation.requeue()
        return
    with pytest.raises(HpcrlError) as raised:
        allocation.requeue()
    assert type(raised.value) is error
