"""Calling mpirun: check that every host answers, start it with a hostfile of its dialect, and wait for its end.

Invariants: a host that cannot be reached is named within a minute, before anything is started; a stop is passed on so
that the run can save; mpirun dies with this process.  A shell inside a job is not an MPI rank, whatever variables its
launcher has left in it.  Where mpirun ends all ranks before any of them could say why, what was said before is kept
behind the cause that is found here; the record of a run that is over, or of another run, is not changed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.groups import describe
from hpcrl.launch.attempts.spare_hosts import mark_spares
from hpcrl.launch.job import RunJob, reopen_job
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.launch.mpi.exit_status_relay import RunLocation
from hpcrl.launch.mpi.hostfile import read_hostfile, write_hostfile
from hpcrl.launch.mpi.ssh_check import REACH, check_hosts, lost_hosts
from hpcrl.launch.preflight import note_absent, refuse_settings
from hpcrl.launch.requeue import last_attempt, names_host
from hpcrl.plan import Host, hosts_kept, make_plan
from hpcrl.rollout.prompts.first_rows import look_at
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.job_files import STATE, WORKING, JobState, process_age, write_state
from hpcrl.run.process import LATE, MISSING, PARENT, end_processes, run_command
from hpcrl.run.scratch import scratch, sweep
from hpcrl.utils.shipped_files import shipped
from hpcrl.utils.untrusted_files import Damaged, read_given, read_json
from hpcrl.utils.waiting import Deadline

GRACE = 30.0  #: seconds that mpirun may take to end when it is told to
#: variables that every host gets as they are here
HANDED_ON = re.compile(
    r"(PYTHONPATH|XDG_STATE_HOME|MPI4PY_MPIABI|LD_LIBRARY_PATH)$|(NCCL|UCX|FI|VLLM|HF|CUDA|TORCH|OMP|GLOO)_"
)
#: and those that none gets: what is ours alone, and what is secret, which `ps` would show
KEPT_BACK = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|^CUDA_VISIBLE_DEVICES$")
REST = 5.0  #: seconds for what was still to be handed on when mpirun ended, and for its ranks to end


def call_mpirun(
    argv: list[str], recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None, own: dict[str, Any]
) -> int:
    """Check what can be checked here, and run mpirun to its end; the exit status.

    Args:
        argv: of `hpcrl launch`, which every rank gets.
        resume: the run directory of a run that continues; None for a new one, of `recipe`.
        own: the flags of `hpcrl launch` alone.

    Raises:
        HpcrlError: says what is wrong; nothing has been started if it is a UsageError.
    """
    if "hostfile" not in own:
        raise UsageError("no hostfile given", "name the machines: --hostfile FILE; hpcrl run needs none")
    found = read_hostfile(own["hostfile"])
    for note in found.notes:
        print(f"hpcrl: note: {note}", file=sys.stderr)
    stages = _stages(recipe, overrides, resume)
    hosts = lambda options: mark_spares(found.hosts, options.spares)  # noqa: E731
    refuse_settings(stages, hosts, packages=resume is None)
    if recipe is not None:
        look_at(stages)
        note_absent(recipe, stages)
    plans = [make_plan(options, hosts(options), "launch", kept=hosts_kept(stages)) for options in stages]
    mpirun, agent = shlex.split(own.get("mpirun", "mpirun")), own.get("agent", "ssh")
    kind, shown = flavour(mpirun), own.get("dry-run") or own.get("print")
    word = "" if shown else exit_status_relay.drawn()
    words = [word for word in argv if word not in ("--dry-run", "--print")]
    program = [*handed_on(word), "bash", str(shipped("launch/task.sh")), "launch", *words]
    sweep()  # after one that was killed
    with scratch("launch") as folder:
        file = folder / "hosts"
        file.write_text(write_hostfile(tuple(Host(host.name, 1) for host in found.hosts), kind))
        command = mpi_command(mpirun, kind, file, len(found.hosts), agent, program)
        if own.get("dry-run"):
            print(f"{plans[-1].table()}\n\n{describe(stages[-1], plans[-1])}\n")
            print(f"# {file.name}, for {mpirun[0]}:\n{read_given(file)}")
        if shown:
            print(shlex.join(command).replace(str(file), "HOSTFILE"))
            return 0
        if not shutil.which(mpirun[0]):
            raise UsageError(f"{mpirun[0]} is not here", "load or install Open MPI or MPICH, or name it with --mpirun")
        names = [] if started_by_scheduler(kind, agent, os.environ) else [host.name for host in found.hosts]
        check_hosts(names, shlex.split(agent))
        return _run(command, kind, agent, word, names)


def handed_on(word: str) -> list[str]:
    """An `env` command with what the ranks need of our environment: not every mpirun hands it on, and hosts that differ
    in a setting of NCCL's hang."""
    kept = {
        name: os.environ[name] for name in sorted(filter(HANDED_ON.match, os.environ)) if not KEPT_BACK.search(name)
    }
    if word:
        kept |= {exit_status_relay.ENVIRONMENT: word, exit_status_relay.ASKED: f"{time.time() - process_age():.2f}"}
    return ["env", f"HPCRL_PYTHON={sys.executable}", *(f"{name}={value}" for name, value in kept.items())]


def _stages(recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None) -> list[Options]:
    if recipe is None:
        assert resume is not None
        return list(reopen_job(resume).stages)
    return list(resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"}))


def flavour(mpirun: list[str]) -> str:
    """openmpi or mpich (and what stems from it), by what the launcher says of itself."""
    answer = run_command([mpirun[0], "--version"], REACH)
    if answer.code in (LATE, MISSING):
        return "openmpi"  # for a dry run; it is looked for before it is called
    return "openmpi" if any(name in answer.out for name in ("Open MPI", "open-mpi", "OpenRTE")) else "mpich"


def mpi_command(mpirun: list[str], kind: str, file: Path, count: int, agent: str, program: list[str]) -> list[str]:
    """mpirun with everything that it must be told."""
    if kind == "openmpi":
        rsh = [] if agent == "ssh" else ["--mca", "plm_rsh_agent", agent]
        more = f"-np {count} --map-by ppr:1:node --bind-to none".split()
        return [*mpirun, "--hostfile", str(file), *more, *rsh, *program]
    rsh = [] if agent == "ssh" else ["-launcher", "ssh", "-launcher-exec", shlex.split(agent)[0]]
    # -machinefile: with -f Intel MPI does not read the slots behind a host
    return [*mpirun, "-machinefile", str(file), *f"-n {count} -bind-to none".split(), *rsh, *program]


def _run(command: list[str], kind: str, agent: str, word: str, hosts: Sequence[str] = ()) -> int:
    """Run mpirun to its end; a first signal asks the run to save, a second ends it.

    Args:
        word: how the line begins by which rank 0 tells that the run is over; what is left of mpirun after that, or
            after a second signal, has GRACE seconds.
        hosts: those that run a command for us, which are asked if the run ends without a word.

    Returns:
        The exit status, as rank 0 told it: how its processes went after that says nothing of the run.
    """
    words = shlex.split(agent)
    environment = {**without_mpi(os.environ), PARENT: str(os.getpid())}
    if kind == "mpich" and words[1:]:
        environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(words[1:])
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcrl.run.process", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    heard = exit_status_relay.OutputRelay(process.stdout, process.stderr, word)
    asked, grace = 0, Deadline(math.inf)

    def passed_on(_: int, __: object) -> None:
        nonlocal asked, grace
        asked += 1
        grace = Deadline(GRACE) if asked == 2 else grace
        process.send_signal(signal.SIGUSR1 if asked == 1 else signal.SIGTERM)  # mpirun hands SIGUSR1 to its ranks

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, passed_on)
    while (status := process.poll()) is None and not grace.over:
        heard.wait(0.2)
        if grace.seconds == math.inf and heard.status is not None:
            grace = Deadline(GRACE)
    until = Deadline(REST)
    if late := status is None:
        _end(process)
        status = 1 if heard.status is None else heard.status
    else:
        while heard.wait(0.2) and not until.over:
            pass
    unsaid = heard.status is None  # by rank 0, or else its word may be that of one who is cut off itself
    if status and heard.place and (asked < 2 if unsaid else not asked and (late or heard.lost)):
        gone = [heard.lost] if heard.lost else lost_hosts(hosts, words)
        if gone or unsaid:
            how = "was ended" if late else how_it_ended(status)
            raise HpcrlError(*explain_end(heard.place, gone, how, heard.died if unsaid else ""))
    if heard.status is not None:
        return heard.status
    if status < 0:
        raise HpcrlError(f"mpirun {how_it_ended(status)}", "its processes have ended with it")
    return status


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, and what it has left: an ssh to a host whose link is cut would outlive it."""
    ours = psutil.Process(process.pid)
    rest = ours.children(recursive=True)
    end_processes([ours], 5.0)
    end_processes(rest, 0.5)
    print(f"hpcrl: note: mpirun did not end within {GRACE:.0f} s and was killed; is a host down?", file=sys.stderr)


# ---- the job around this process

#: variables of an MPI launcher, by how their names begin
LEFT_BEHIND = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "HYDI_", "HYDRA_CONTROL")


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an mpirun has started this process.

    `srun --pty bash` gives its shell the variables of a world of one (PMIX_RANK, or PMI_SIZE=1) and SLURM_PTY_PORT:
    that is not a rank; mpirun called in such a shell sets its own variables.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return True
    world = any(name in environment for name in ("PMI_SIZE", "PMI_RANK", "PMIX_RANK"))
    shell = "SLURM_PTY_PORT" in environment and environment.get("PMI_SIZE", "1") == "1"
    return world and not shell


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for an mpirun that is called in such a shell."""
    return {name: value for name, value in environment.items() if not name.startswith(LEFT_BEHIND)}


def started_by_scheduler(kind: str, agent: str, environment: Mapping[str, str]) -> bool:
    """Whether mpirun reaches the hosts through the scheduler and needs no ssh: Open MPI inside a Slurm job takes srun,
    unless it was given an agent (its plm slurm)."""
    return kind == "openmpi" and agent == "ssh" and "SLURM_JOB_ID" in environment


# ---- what to say of a run that mpirun ended


def explain_end(place: RunLocation, lost: Sequence[str], how: str, died: str = "") -> tuple[str, str]:
    """(what has happened, what to do); recorded as the error of the run at `place`, where this machine sees it.

    Args:
        lost: hosts that mpirun or this machine cannot reach.
        how: mpirun ended.
        died: the host on which mpirun saw a rank die.
    """
    hosts = f"{'hosts' if lost[1:] else 'host'} {', '.join(lost)}"
    what = f"{hosts} cannot be reached any more, and mpirun {how}" if lost else f"mpirun {how} before the run was over"
    if died and not lost:
        what = f"host {died}: its MPI rank died before the run was over, and mpirun {how}"
    with contextlib.suppress(OSError, HpcrlError):
        if (job := reopen_job(place.root)).identity == place.identity:  # and not another's of that name
            _record(job, lost, what)
    again = f"hpcrl launch --resume {place.root} --hostfile FILE"
    if lost:
        return what, f"is it up, and its network? continue without it, or when it is back: {again}"
    return what, f"its processes have ended with it; its output is above; continue with {again}"


def _record(job: RunJob, lost: Sequence[str], what: str) -> None:
    rundir = last_attempt(job)
    if rundir is None:
        return
    first = rundir.failure()
    if first is None or (lost and (first.role != "launcher" or not all(names_host(first, host) for host in lost))):
        rundir.correct(f"{what} (first seen as: {first})" if first else what)
    time.sleep(REST)  # rank 0 may live for a moment longer than its mpirun, and write its own state
    try:
        state = read_json(job.root / STATE, JobState)
    except Damaged:
        return
    if state.phase in WORKING:  # the launcher had no time to say how it ended
        ended = JobState("failed", time.time(), attempt=rundir.attempt, message=what, host=socket.gethostname())
        write_state(job.root, ended)
