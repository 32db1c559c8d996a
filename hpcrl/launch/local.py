"""`hpcrl run`: every role a process of this machine.

Invariant: nothing listens anywhere but on the loopback.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.launch.attempts.host_processes import HostProcess
from hpcrl.launch.job import begin_job, reopen_job, run_job
from hpcrl.launch.roles import role_environment
from hpcrl.launch.user_code.snapshot import resume_code
from hpcrl.plan import Host, Plan, local_hosts
from hpcrl.run.exit_status import MemoryWatch
from hpcrl.run.gpu_environment import for_this_machine
from hpcrl.run.rundir import RunDir
from hpcrl.utils.untrusted_files import open_append


class Local:
    """This machine, as one host."""

    left_out: Sequence[str] = ()
    python = sys.executable

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        return one_host(options)

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[HostProcess]:
        log, memory = rundir.logs / "host.log", MemoryWatch()
        (host,) = plan.hosts
        words = [str(rundir.root), "--attempt", str(rundir.attempt), "--host", host]
        process = spawn([sys.executable, "-m", "hpcrl.launch.host", *words], log)
        return [HostProcess("the process of this host", log, process, memory)]

    def leave_out(self, hosts: Sequence[str]) -> None:
        """There is no other host: a plan without this one is refused."""

    def again(self, root: Path) -> str:
        return f"hpcrl resume {root}"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-m", "hpcrl.run.process", *command], log)


def one_host(options: Options) -> list[Host]:
    """This machine.

    Raises:
        UsageError: for a run that is to have others to spare.
    """
    if options.spares:
        raise UsageError(f"--spares {options.spares}: hpcrl run has one host", "give --spares 0 here")
    return local_hosts(options)


def spawn(command: list[str], log: Path | None) -> subprocess.Popen[bytes]:
    """Start a process of the launcher, its output going to a log, or nowhere."""
    with open_append(log) if log else contextlib.nullcontext(subprocess.DEVNULL) as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=role_environment(),
        )


def run_recipe(recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None) -> int:
    """Start a recipe, or resume a run; returns the exit status.

    Args:
        overrides: what the flags set; of a run that is resumed only --live-code counts.

    Raises:
        HpcrlError: says what went wrong.
    """
    if resume:
        job = reopen_job(resume)
        return run_job(job, Local(), begin=partial(resume_code, job.root, overrides.get("live_code")))
    assert recipe is not None
    job = begin_job(recipe, for_this_machine(recipe, overrides), one_host)
    return run_job(job, Local())
