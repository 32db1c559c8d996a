"""A run inside a Slurm job: the batch process starts every host with srun, watches them, and queues the job again.

    python -m hpcrl.slurm.batch_process RECIPE.toml --run-dir RUN [--option value ...]     what sbatch/*.sbatch run

Invariants: hosts and their order come from Slurm's node lists; a job that is out of time, preempted or has lost a node goes
on where its last checkpoint stands, with the same numbers; one that makes no headway is not started again for ever.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.doctor.all_nodes import NodesJob as Look
from hpcrl.doctor.all_nodes import NodeStep, examine
from hpcrl.errors import DeadlineError, HpcrlError, Stopped, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempt import Member, Stop
from hpcrl.launch.job import Job, begin_job, reopen_job, run_job, say
from hpcrl.launch.local import spawn
from hpcrl.launch.restart_policy import check_headway, margin
from hpcrl.plan import Host, Plan
from hpcrl.report.file_tail import last_lines
from hpcrl.run.job_state import JobStateFile
from hpcrl.run.rundir import RunDir
from hpcrl.run.summary import read_summary

CALL = 30.0  #: seconds that a Slurm command may take


@dataclass(frozen=True)
class HetGroup:
    """One component of the job: its nodes, the slots of each, and the srun that starts a task on each of them."""

    nodes: tuple[str, ...]
    slots: int
    step: tuple[str, ...]


def read_groups(environment: Mapping[str, str]) -> list[HetGroup]:
    """The components, from what Slurm and the batch script put into the environment.

    UsageError if this is no job, or the script lacks a HPCRL_STEP_k or HPCRL_SLOTS_k.
    """
    if "SLURM_JOB_ID" not in environment:
        raise UsageError("this is not inside a Slurm job", "submit it with hpcrl submit, or give the script to sbatch")
    count = int(environment.get("SLURM_HET_SIZE", "1"))
    found = []
    for index in range(count):
        suffix = f"_HET_GROUP_{index}" if "SLURM_HET_SIZE" in environment else ""
        try:
            nodes = expand(environment[f"SLURM_JOB_NODELIST{suffix}"])
            step, slots = environment[f"HPCRL_STEP_{index}"], int(environment[f"HPCRL_SLOTS_{index}"])
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"the job's environment has no good {error}", "start from a script of sbatch/ or of hpcrl submit --dry-run"
            ) from error
        found.append(HetGroup(tuple(nodes), slots, tuple(shlex.split(step))))
    return found


def expand(nodelist: str) -> list[str]:
    """node[1-3,7] -> node1, node2, node3, node7, in Slurm's order."""
    from hostlist import BadHostlist, expand_hostlist

    try:
        return expand_hostlist(nodelist, allow_duplicates=True)
    except BadHostlist as error:
        raise UsageError(f"Slurm's node list {nodelist} cannot be read: {error}") from error


class Slurm:
    """The hosts of this job, reached with srun."""

    def __init__(self, groups: list[HetGroup]) -> None:
        self.groups, self.count = groups, sum(len(group.nodes) for group in groups)
        self.examined = False

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        """Every host's own report first; then the network that all of them share."""
        names = [node for group in self.groups for node in group.nodes]
        log = rundir.logs / "probe.log"
        steps = [spawn(self._step(group, "probe", rundir), log) for group in self.groups]
        try:
            reports = probe.gather(rundir, names, options.launch_timeout, lambda: _check_started(steps, log))
        except DeadlineError as error:
            raise HostsSilent(error.what, f"{error.hint} See {log}") from None
        finally:
            for step in steps:
                step.terminate()
        network = probe.choose(reports, options.interface)
        self._examine(options, rundir)
        slots = [(node, group.slots) for group in self.groups for node in group.nodes]
        return [Host(node, count, network[node].address, network[node].interface) for node, count in slots]

    def _examine(self, options: Options, rundir: RunDir) -> None:
        """What `hpcrl doctor --nodes` looks at in passing, once: HpcrlError names the first thing that is wrong."""
        if self.examined:
            return
        self.examined = True
        roles = ("trainer", "engine", "rollout")[: len(self.groups)]
        steps = [NodeStep(role, len(g.nodes), g.slots, [*g.step, "doctor"]) for role, g in zip(roles, self.groups, strict=True)]
        look = Look(steps, options.interface, gpus=False, allreduce=False, imports=False, seconds=options.launch_timeout)
        findings = examine(look, rundir.here / "doctor", options.launch_timeout)
        for finding in findings:
            if finding.level == "warn":
                say(finding.line())
        if bad := [finding for finding in findings if finding.level == "fail"]:
            raise HpcrlError(
                f"{bad[0].line()}{f' (and {len(bad) - 1} more)' if bad[1:] else ''}", "hpcrl doctor --nodes shows all"
            )

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[Member]:
        members = []
        for index, group in enumerate(self.groups):
            if set(group.nodes) & set(plan.hosts):
                log = rundir.logs / f"step-{index}.log"
                name = f"srun on {','.join(group.nodes)}"
                members.append(Member(name, log, spawn(self._step(group, "host", rundir), log)))
        return members

    def again(self, root: Path) -> str:
        return f"hpcrl resume {root}"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-m", "hpcrl.run.process", *self.groups[0].step, "once", *command], log)

    def silent(self, seconds: float) -> list[str]:
        """The hosts that cannot start a task within `seconds`."""
        waiting = {
            node: spawn([sys.executable, "-m", "hpcrl.run.process", *_alone(group.step, node), "once", "true"], Path(os.devnull))
            for group in self.groups
            for node in group.nodes
        }
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in waiting.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        bad = [node for node, process in waiting.items() if process.poll() != 0]
        for process in waiting.values():
            if process.poll() is None:
                process.kill()
        return bad

    def _step(self, group: HetGroup, program: str, rundir: RunDir) -> list[str]:
        words = [program, str(rundir.root), "--attempt", str(rundir.attempt)]
        return [sys.executable, "-m", "hpcrl.run.process", *group.step, *words]


def _check_started(steps: list[subprocess.Popen[bytes]], log: Path) -> None:
    """HpcrlError with its last words if an srun could not start its tasks."""
    if any(step.poll() for step in steps):
        said = [text for line in last_lines(log) if "error: " in (text := line.decode(errors="replace")).lower()]
        ours = [line.partition("hpcrl: error: ")[2] for line in said if "hpcrl: error: " in line]
        why = (ours or said or ["srun gave no reason"])[0]
        raise HpcrlError(f"the first tasks did not start: {why}", f"see {log}")


class HostsSilent(DeadlineError):
    """Hosts of the job did not answer: another allocation may do better."""


def _alone(step: tuple[str, ...], node: str) -> list[str]:
    """The same srun, for one task on one node: of options given twice the later counts."""
    at = next((i for i, word in enumerate(step) if i and not word.startswith("-")), len(step))
    only = [f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    return [*step[:at], *only, *step[at:]]


# ---- time


@dataclass
class Clock:
    """Asks the run to save and end before the job's time limit, by what its own steps have taken.

    Slurm's SIGUSR1 may come a minute early, or because the limit was changed: it makes us look again, and decides only
    where the limit is not known.  due: whether it has asked.
    """

    job_id: str
    floor: float
    ends: float | None = None
    due: bool = False
    next_look: float = 0.0

    def __post_init__(self) -> None:
        self.ends = time_limit(self.job_id)

    def watch(self, stop: Stop, rundir: RunDir | None) -> None:
        now, nudged = time.time(), stop.nudges > 0
        if now < self.next_look and not nudged:
            return
        stop.nudges, self.next_look = 0, now + 5.0
        if nudged:
            self.ends = time_limit(self.job_id)
        needed = margin(rundir, self.floor) if rundir else self.floor
        if (self.ends is None and nudged) or (self.ends is not None and now > self.ends - needed):
            self.due = self.due or not stop.requests
            stop.ask("the time limit is near")


def time_limit(job_id: str) -> float | None:
    """When Slurm will end the job, in Unix seconds; None without a limit, or where Slurm does not say."""
    try:
        text = call(["squeue", "--noheader", "--job", job_id, "--format=%e"]).split()
        return time.mktime(time.strptime(text[0], "%Y-%m-%dT%H:%M:%S")) if text else None
    except (HpcrlError, ValueError):
        return None


def call(command: list[str]) -> str:
    """A Slurm command's output.  HpcrlError with what it said if it failed or did not answer within CALL seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL, check=False)
    except FileNotFoundError:
        raise HpcrlError(f"{command[0]} is not here", "is this a node of the Slurm cluster?") from None
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{command[0]} did not answer within {CALL:.0f} s", "is slurmctld up? see scontrol ping") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise HpcrlError(f"{shlex.join(command)}: {said}")
    return done.stdout


# ---- the batch process


def run(job: Job) -> dict[str, Any]:
    """Bring a job to its end in this allocation; returns the last stage's summary, or that of a run that was stopped.

    Out of time, or with a host lost, the job is queued again and this process waits for Slurm to end it.
    """
    job_id, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    backend = Slurm(read_groups(os.environ))
    clock = Clock(job_id, float(os.environ.get("HPCRL_SIGNAL_MARGIN", "180")))
    check_headway(job.root, restarts)
    try:
        run_job(job, backend, restarts, clock.watch, clock.ends)
    except Stopped as stopped:
        if clock.due:
            requeue(job, job_id, restarts, stopped.what)
        say(str(stopped))
        return {"status": "stopped", "message": str(stopped)}
    except HpcrlError as error:
        if isinstance(error, HostsSilent):
            requeue(job, job_id, restarts, str(error))
        elif (lost := backend.silent(20.0)) and len(lost) < backend.count:  # all of them: that is not the hosts' fault
            requeue(job, job_id, restarts, f"no answer from {', '.join(lost)} ({error})")
        raise
    return final_summary(job)


def final_summary(job: Job) -> dict[str, Any]:
    """The last stage's summary.json."""
    summary = read_summary(job.directory(job.recipe.stages[-1]))
    return {} if summary is None else msgspec.to_builtins(summary)


def requeue(job: Job, job_id: str, restarts: int, why: str) -> None:
    """Queue the job again and wait to be ended; returns if the limit is reached, or Slurm refuses."""
    limit = int(os.environ.get("HPCRL_MAX_REQUEUES", "0"))
    if restarts >= limit:
        say(f"{why}; not queued again: {restarts} of {limit} requeues are used up; go on with hpcrl resume {job.root}")
        return
    JobStateFile(job.root, restarts).set("requeued", message=why)  # before, since Slurm may end us at once
    try:
        call(["scontrol", "requeue", job_id])
    except HpcrlError as error:
        if "requeu" not in str(error).lower() and "completing" not in str(error).lower():  # Slurm may have been faster
            JobStateFile(job.root, restarts).set("stopped", message=why)
        say(f"{why}; Slurm does not requeue it: {error}; go on with hpcrl resume {job.root}")
        return
    say(f"{why}; queued again ({restarts + 1} of {limit} requeues)")
    time.sleep(300)  # Slurm ends us long before


def run_directory(root: str) -> dict[str, Any]:
    """What hpcrl submit has submitit call in the job: go on with the run directory that it made."""
    return run(reopen_job(Path(root)))


def main(argv: list[str] | None = None) -> int:
    """Start RECIPE in RUN, or go on with it if this job has been there before."""
    from hpcrl.config.flags import parse_flags
    from hpcrl.config.recipe import load_recipe
    from hpcrl.run.job_file import write_job

    try:
        overrides, _, words = parse_flags(sys.argv[1:] if argv is None else argv)
        if len(words) != 1 or "run_dir" not in overrides:
            raise UsageError("a recipe and --run-dir are needed", "see the last line of the batch script")
        root = Path(overrides["run_dir"])
        groups = read_groups(os.environ)
        stand_ins = [Host(node, group.slots) for group in groups for node in group.nodes]
        if (root / "recipe.json").is_file():
            job = reopen_job(root)
        else:
            job = begin_job(load_recipe(words[0]), overrides, lambda _: stand_ins)
        write_job(job.root, job.identity, "slurm", os.environ["SLURM_JOB_ID"])
        call(["scontrol", "update", f"jobid={os.environ['SLURM_JOB_ID']}", f"comment=hpcrl:{job.identity}"])
        run(job)
    except HpcrlError as error:
        print(f"hpcrl: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
