"""A Slurm for tests, without daemons and without root: `sbatch`, `srun`, `squeue`, `scontrol`, `scancel` and `sinfo`
that run jobs on this machine.

    path = install(tmp_path / "slurm")      # the directory of the programs, for the beginning of PATH

The queue is a file (`queue_file`), whose directory the programs carry in them.  Each job has a keeper (`keeper`), which
stands for slurmctld and slurmd: it waits for the job's turn, starts the batch script, starts the tasks of its steps for
`srun`, warns it before its time limit, ends it, and queues it again.

Every node is this machine under another name.  Formats and messages are those of Slurm 22.05.8.  An option or a field
that no program here knows is an error, as a new one of ours is to be noticed.  What is not here: accounting, job
arrays, memory, preemption, nodes that fail, and a requeue or a cancel by the component of a heterogeneous job.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.fake_slurm import queue_file

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr")
HERE = Path(__file__).parent


def install(folder: Path, nodes: int = 4) -> Path:
    """Make an empty queue of so many nodes in `folder`; the directory of the programs."""
    (folder / "bin").mkdir(parents=True)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    (folder / "queue.json").write_text(json.dumps({"nodes": names, "last": 0, "jobs": {}}))
    for name in PROGRAMS:
        module = HERE / ("srun.py" if name == "srun" else "programs.py")
        words = [sys.executable, "-ESs", str(module), name, str(folder)]  # -S: a program starts in 20 ms
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
    return folder / "bin"


class FakeSlurm:
    """A queue in a directory, and what tests ask of it, in the words of `tests.support.cluster.Cluster`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        site = folder.with_suffix(".toml")
        programs = install(folder)
        site.write_text("")  # and not the user's own profile
        around = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env = around | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HPCRL_SITE": str(site)}

    def run(
        self,
        command: Sequence[str | Path],
        node: str = "head",
        *,
        check: bool = True,
        timeout: float = 240.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; AssertionError with its output if `check` and it fails."""
        words = list(map(str, command))
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env={**(env or {}), **self.env})
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run(["scontrol", "--oneliner", "show", "job", str(number)]).stdout.splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end(self, seconds: float = 60) -> list[str]:
        """Give every job a while to end, then cancel it; what had to be cancelled, or said that it failed itself."""
        deadline = time.monotonic() + seconds
        left = []
        with queue_file.locked(self.folder) as queue:
            jobs = list(queue["jobs"].values())
        for job in jobs:
            while _lives(job["keeper"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            if _lives(job["keeper"]):
                left.append(f"job {job['id']} is {self.job(job['id'])['JobState']}")
                self.run(["scancel", job["id"]])
                last = time.monotonic() + queue_file.KILL_WAIT + 10
                while _lives(job["keeper"]) and time.monotonic() < last:
                    time.sleep(0.05)
        return left + [said for log in self.folder.glob("job*/keeper.log") if (said := log.read_text())]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
