"""A shell inside a job is told from a rank that mpirun has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.launch.mpi.mpirun import started_by_scheduler, under_mpi, without_mpi

SHELL = {"SLURM_JOB_ID": "7", "SLURM_PTY_PORT": "4000", "PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, False),
        (SHELL, False),
        ({"SLURM_PTY_PORT": "4000", "PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        (SHELL | {"OMPI_COMM_WORLD_SIZE": "4"}, True),
        (SHELL | {"PMI_RANK": "0", "PMI_SIZE": "4"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        ({"PMIX_RANK": "3"}, True),
    ],
)
def test_who_is_a_rank(environment: dict[str, str], rank: bool) -> None:
    assert under_mpi(environment) == rank


def test_mpirun_gets_nothing_of_another_world() -> None:
    left = without_mpi(SHELL | {"PMI_RANK": "0", "PATH": "/bin", "OMPI_MCA_btl": "tcp", "OMPI_COMM_WORLD_RANK": "0"})
    assert left == {"SLURM_JOB_ID": "7", "SLURM_PTY_PORT": "4000", "PATH": "/bin", "OMPI_MCA_btl": "tcp"}


def test_inside_a_job_open_mpi_needs_no_ssh() -> None:
    assert started_by_scheduler("openmpi", "ssh", SHELL)
    assert not started_by_scheduler("openmpi", "ssh -p 2222", SHELL), "the agent is what it was told to take"
    assert not started_by_scheduler("mpich", "ssh", SHELL) and not started_by_scheduler("openmpi", "ssh", {})


def test_a_dry_run_joins_no_mpi_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "hosts").write_text("n1 slots=2\n")
    recipe = Path(__file__).parents[3] / "examples" / "quickstart.toml"
    assert main(["launch", str(recipe), "--hostfile", str(tmp_path / "hosts"), "--dry-run"]) == 0
    assert "mpirun --hostfile HOSTFILE" in capsys.readouterr().out
