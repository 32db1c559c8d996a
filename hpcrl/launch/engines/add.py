"""More engines for a run that is under way: processes of this machine, or a separate job.

Invariant: nothing of the run's own job is touched; what is submitted is, as text, in RUN/added.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import CPUS_PER_SLOT
from hpcrl.launch.container import mountable
from hpcrl.launch.roles import role_environment
from hpcrl.launch.scheduler import AllocationRequest, BatchScript, Component, can_submit, load_scheduler, task_python
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.submission import refuse_unfit
from hpcrl.run.process import PARENT
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.shipped_files import shipped
from hpcrl.untrusted_files import open_append

JOIN = "hpcrl.launch.engines.join"
MARGIN = 60  #: seconds before its time limit at which an added job is told to let its engines finish


@dataclass(frozen=True)
class Added:
    """What was started.

    Attributes:
        what: for the user.
        log: of the process that supervises the engines.
    """

    what: str
    log: Path


def add_here(rundir: RunDir, engines: int, first_slot: int) -> Added:
    """Start so many `engines` on this machine, on the GPUs from `first_slot` on; they live as long as the attempt
    does."""
    log = rundir.logs / f"join-{os.getpid()}.log"
    words = [
        str(rundir.root),
        "--attempt",
        str(rundir.attempt),
        "--engines",
        str(engines),
        "--first-slot",
        str(first_slot),
    ]
    host = ["--host", local_name(rundir)]
    env = {name: value for name, value in role_environment().items() if name != PARENT}
    with open_append(log) as out:
        started = subprocess.Popen(
            [sys.executable, "-m", JOIN, *words, *host],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
    return Added(f"process {started.pid}", log)


def local_name(rundir: RunDir) -> str:
    """What the plan calls this machine.

    Raises:
        UsageError: if the run is somewhere else.
    """
    plan = read_plan(rundir)
    ours = {"127.0.0.1", os.uname().nodename, os.uname().nodename.partition(".")[0]}
    if found := next((host for host in plan.hosts if host in ours), None):
        return found
    raise UsageError(
        f"the run is on {', '.join(plan.hosts[:4])}, not on this machine", "add engines in a job: --site NAME"
    )


def request_of(options: Options, site: SiteProfile, nodes: int, each: int) -> AllocationRequest:
    """An allocation of `nodes` nodes with `each` engines on every one."""
    slots = each * options.rollout_num_gpus_per_engine
    cpus = site.engine.cpus_per_node or (None if site.exclusive else CPUS_PER_SLOT * slots)
    return AllocationRequest("heterogeneous", (Component("engine", nodes, slots, cpus),), MARGIN)


def command(rundir: RunDir, each: int) -> str:
    """The shell text that becomes the batch process: the step itself, so that signals reach its tasks."""
    rest = shlex.join(["join", str(rundir.root), "--attempt", str(rundir.attempt), "--engines", str(each)])
    return f'bash -c "exec $HPCRL_STEP_0 "{shlex.quote(rest)}'


def output_of(rundir: RunDir) -> Path:
    """Where the next added job writes: no name that another has."""
    taken = {path.name for path in rundir.logs.glob("join-job-*.log")} | {
        f"join-job-{path.stem}.log" for path in (rundir.root / "added").glob("[0-9]*.*")
    }
    return rundir.logs / next(name for n in count() if (name := f"join-job-{n}.log") not in taken)


def script_of(rundir: RunDir, options: Options, site: SiteProfile, nodes: int, each: int) -> str:
    """The text of the job."""
    folder = rundir.root / "added"
    script = BatchScript(
        name=f"engines-{rundir.root.name}",
        title=f"{nodes * each} engine{'s' if nodes * each > 1 else ''} more for {rundir.root}",
        summary=f"{nodes} node{'s' if nodes > 1 else ''} with {each} engine{'s' if each > 1 else ''} each",
        command=command(rundir, each),
        output=str(output_of(rundir)),
        launch=str(folder / "launch"),
        mounts=(mountable(rundir.root),),
        python=task_python(site),
    )
    return load_scheduler(site.scheduler).render(script, request_of(options, site, nodes, each), site)


def submit_added(rundir: RunDir, options: Options, site: SiteProfile, nodes: int, each: int) -> Added:
    """Submit a job whose engines join the run.

    Raises:
        UsageError: if the scheduler is not here or refuses it.
    """
    scheduler = load_scheduler(site.scheduler)
    if not can_submit(scheduler):
        raise UsageError(f"{scheduler.submit_command} is not here", "submit from a login node of the cluster")
    refuse_unfit(scheduler, request_of(options, site, nodes, each), site)
    text = script_of(rundir, options, site, nodes, each)
    folder = rundir.root / "added"
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(shipped("launch"), folder / "launch", dirs_exist_ok=True)
    log = output_of(rundir)
    file = folder / f"{log.stem.removeprefix('join-job-')}{Path(scheduler.script_file).suffix}"
    write_atomic(file, text.encode())
    return Added(f"job {scheduler.submit_script(file)}", log)
