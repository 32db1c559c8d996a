"""`hpcrl launch` under an mpirun on this machine alone: Open MPI's wheel of `make env`, or the machine's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.errors import UsageError
from hpcrl.launch.mpi.rank_main import check_library
from tests.support.able import find_mpirun, needs
from tests.support.runs import SFT, alive, all_gone, metrics, recipe

pytestmark = [pytest.mark.process, pytest.mark.core, needs("mpirun")]
ENV = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def hpcrl(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcrl", *map(str, words)],
        env=os.environ | ENV | env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_run_under_mpirun_of_this_machine(tmp_path: Path, task: Path) -> None:
    agent = tmp_path / "agent"  # in place of ssh: the command runs here
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{socket.gethostname()} slots=2\n")
    words = ["--hostfile", hosts, "--mpirun", find_mpirun(), "--agent", agent]
    path = recipe(tmp_path, task, **(SFT | {"actor_num_gpus_per_node": 2, "num_rollout": 4}))
    root = tmp_path / "run"
    done = hpcrl("launch", path, *words, "--run-dir", root)
    assert done.returncode == 0, done.stderr
    assert f"1 hosts: {socket.gethostname()} (2 slots)" in done.stdout + done.stderr
    assert list(metrics(root)) == list(range(4))
    plan = json.loads((root / "attempts/0/plan.json").read_text())
    assert len(plan["trainers"]) == 2
    assert json.loads((root / "job.json").read_text())["scheduler"] == "mpirun"
    assert all_gone(root, [])


def test_the_library_of_another_mpi_is_named(tmp_path: Path) -> None:
    """Before MPI_Init, which would end the process or make a world of its own of it."""
    code = "from hpcrl.launch.mpi.rank_main import join_world; join_world()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | ENV | {"PMI_SIZE": "3"},  # of an MPICH mpirun
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "mpirun of MPICH" in done.stderr and "opened Open MPI" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("library", "environment", "named"),
    [
        ("Open MPI v5.0.11, package", {"OMPI_COMM_WORLD_SIZE": "2"}, ""),
        ("MPICH Version:      5.0.2\nrest", {"PMI_SIZE": "2"}, ""),
        ("Intel(R) MPI Library 2021.14", {"PMI_SIZE": "2", "SLURM_PROCID": "0"}, ""),
        ("Open MPI v4.1.4, package", {"PMI_SIZE": "2", "SLURM_PROCID": "0"}, ""),  # srun --mpi=pmi2
        ("Open MPI v4.1.4, package", {"PMI_SIZE": "2", "SLURM_PROCID": "0", "HYDI_CONTROL_FD": "8"}, "MPICH"),
        ("Open MPI v5.0.11, package", {"PMI_SIZE": "2"}, "MPICH"),
        ("MPICH Version:      5.0.2\nrest", {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "Open MPI"),
        ("MPICH Version:      5.0.2\nrest", {}, ""),
    ],
)
def test_a_library_fits_its_mpirun(library: str, environment: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=f"mpirun of {named}") if named else contextlib.nullcontext():
        check_library(library, environment)


def run_rank(code: str) -> subprocess.CompletedProcess[str]:
    """A process that runs this code with `rank_main`, and with a channel as rank 0 has one, whose calls the code sets."""
    head = "import subprocess, sys, time\nfrom types import SimpleNamespace\nfrom hpcrl.launch.mpi import rank_main\n"
    head += "channel = SimpleNamespace(rank=0, world=SimpleNamespace())\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60)


def test_an_error_of_the_system_leaves_no_process() -> None:
    """Such as a stale file handle, while rank 0 waits for a command."""
    done = run_rank(
        "def gather(report):\n"
        "    started = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "    print(started.pid, flush=True)\n"
        "    raise OSError(116, 'Stale file handle')\n"
        "channel.gather = gather\n"
        "rank_main.join_world = lambda: (channel, None)\n"
        "rank_main.run_ranks(None, {}, None, None)\n"
    )
    assert done.returncode == 1 and "Stale file handle" in done.stderr, done.stderr
    assert not alive(int(done.stdout))


def test_an_abort_that_never_returns() -> None:
    """As MPICH's where the link is cut: the rank ends all the same."""
    done = run_rank(
        "channel.close = lambda last: False\n"
        "channel.world.Abort = lambda status: time.sleep(60)\n"
        "rank_main.leave_world(channel, 1, None)\n"
    )
    assert done.returncode == -signal.SIGALRM, done.stderr
