"""A run inside a Slurm job: the batch process brings it to its end, or has the job queued again.

Invariants: a job that is out of time, preempted or has lost a host resumes from its last checkpoint, with the
same numbers; one that makes no headway is not started again for ever; a stop that the user asked for is never followed
by a start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.flags import parse_flags
from hpcrl.config.recipe import load_recipe
from hpcrl.config.stage_flags import split_name, stage_flag
from hpcrl.errors import HpcrlError, PeerError, Stopped, UsageError
from hpcrl.launch.allocation import Allocation, AlreadyRequeued, SchedulerSilent
from hpcrl.launch.attempts.attempt import HostsSilent
from hpcrl.launch.attempts.progress import check_headway
from hpcrl.launch.attempts.retries import HostFault
from hpcrl.launch.broken_hosts import BROKEN, broken_hosts, note_broken_host
from hpcrl.launch.job import RunJob, begin_job, discard_unbegun, reopen_job, run_job
from hpcrl.launch.requeue import (
    correct_error,
    explain_last_end,
    hand_over,
    last_attempt,
    later_jobs,
    lost_hosts,
    nothing_left_to_do,
    place_in_chain,
    seen_broken,
)
from hpcrl.launch.time_limit import LOOK, TimeLimitWatcher
from hpcrl.launch.user_code.snapshot import resume_code
from hpcrl.report.progress import say
from hpcrl.run.job_files import CANCEL, STOP, JobStateFile, judging, read_job, settle, write_job
from hpcrl.run.started_runs import LIVE, is_run, read_recipe_file
from hpcrl.run.storage_errors import write_obstacle
from hpcrl.run.summary import read_summary
from hpcrl.utils.waiting import Deadline, Pauses, retry

SILENT = 20.0  #: seconds in which every host must start a task after a failure, or it counts as lost
PATIENCE = 900.0  #: seconds for which a scheduler that does not answer is asked to queue a job again
AGAIN = 5.0  #: seconds between two of these questions
PARTING = 300.0  #: seconds to wait for the scheduler to end a job that it has queued again: it does long before


def run_in_job(job: RunJob, allocation: Allocation, begin: Callable[[], None] | None = None) -> dict[str, Any]:
    """Bring a job to its end in this allocation; returns the last stage's summary, or that of a run that was stopped.

    Out of time, or with a host lost, the job is queued again and this process waits for the scheduler to end it.
    HPCRL_SIGNAL_MARGIN and HPCRL_MAX_REQUEUES of the batch script say how long before the limit, and how often.

    Args:
        begin: see `run_job`.
    """
    if why := nothing_left_to_do(job, allocation.job_id):
        say(f"{why}: nothing to do for job {allocation.job_id} of the chain")
        return final_summary(job)
    clock = TimeLimitWatcher(allocation.ends, float(os.environ.get("HPCRL_SIGNAL_MARGIN", "180")), allocation.preempted)
    explain_last_end(job, allocation)
    check_headway(job.root, allocation.restarts + place_in_chain(read_job(job.root), allocation.job_id))
    gone: dict[int, str] = {}  # attempt -> hosts that did not answer when it was asked whether the run stays on them
    leave = partial(_leave, job, allocation, clock, gone)
    with _no_warning():
        try:
            args = (job, allocation.backend, allocation.restarts, clock.watch, clock.ends)
            run_job(*args, judged=True, begin=begin, leave=leave)
        except HpcrlError as error:
            last: HpcrlError = error
            try:
                with judging(job.root):
                    return _judge(job, allocation, clock, error, gone.get(_number(job), ""))
            except HpcrlError as found:
                last = found
                raise
            finally:
                settle(job.root, last)
    return final_summary(job)


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Slurm's SIGUSR1 (the time limit is near) ends nothing here: this process may be about to queue the job again."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _judge(
    job: RunJob, allocation: Allocation, clock: TimeLimitWatcher, error: HpcrlError, gone: str = ""
) -> dict[str, Any]:
    """Have a job that has ended early queued again where that leads on.

    Args:
        gone: which hosts were lost or silent; "" if that was not asked.

    Returns:
        The summary of a run that was stopped.

    Raises:
        HpcrlError: says why it failed.
    """
    if isinstance(error, Stopped):
        if clock.due:
            _requeue(job, allocation, error.what, clock.ends)
        elif _preempted(job, allocation):  # it was told to end, with a grace time, and has
            _requeue(job, allocation, f"preempted; {error.what}", clock.ends)
        say(str(error))
        return {"status": "stopped", "message": str(error)}
    _tell(job, allocation, error)
    if isinstance(error, HostsSilent) or clock.due:  # out of time all the same: it resumes from the last checkpoint
        _requeue(job, allocation, str(error), clock.ends)
    elif _preempted(job, allocation):  # every process was told to end, and one was faster than a checkpoint
        _requeue(job, allocation, f"preempted ({error})", clock.ends)
    elif broken := _broken_host(job):
        _start_elsewhere(job, allocation, *broken, clock.ends)
    elif lost := gone or _lost(job, allocation).why:
        why = f"{lost} (first seen as: {error.what})"
        correct_error(job, why)
        _requeue(job, allocation, why, clock.ends)
        raise PeerError(why, f"the last checkpoint is good: hpcrl resume {job.root}") from error
    raise error


def _leave(
    job: RunJob,
    allocation: Allocation,
    clock: TimeLimitWatcher,
    gone: dict[int, str],
    error: HpcrlError,
    well: bool,
    stuck: Mapping[str, str],
) -> HostFault:
    """Why the run does not continue on the hosts of this job, and without which of them it may.

    Args:
        gone: gets which hosts the attempt has lost, if any: by the time that `_judge` asked, they might answer again.
        well: whether every host has just said that it is there.
        stuck: host -> what cannot be killed there.
    """
    if clock.due:
        return HostFault("the time limit is near")
    if _preempted(job, allocation):
        return HostFault("preempted")
    broken = seen_broken(job)
    if broken:
        note_broken_host(job.root, *broken)
        _tell_chain(job, allocation, [broken[0]])
    faults = [HostFault(f"host {broken[0]} is broken ({broken[1]})", (broken[0],))] if broken else []
    lost = [HostFault(why, (host,)) for host, why in stuck.items()] + (
        [] if well else [_lost(job, allocation, twice=True)]
    )
    if why := "; ".join(fault.why for fault in lost if fault.why):
        gone[_number(job)] = why
    faults += [fault for fault in lost if fault.why]
    hosts = dict.fromkeys(host for fault in faults for host in fault.hosts)
    return HostFault("; ".join(fault.why for fault in faults), tuple(hosts))


def _tell_chain(job: RunJob, allocation: Allocation, hosts: list[str]) -> None:
    """Keep the later jobs of a chain off these hosts, where Slurm does that."""
    for number in later_jobs(msgspec.structs.replace(read_job(job.root), job_id=allocation.job_id)):
        with contextlib.suppress(HpcrlError):
            allocation.leave_out(number, hosts)


def _number(job: RunJob) -> int:
    """The last attempt's."""
    rundir = last_attempt(job)
    return -1 if rundir is None else rundir.attempt


def _lost(job: RunJob, allocation: Allocation, twice: bool = False) -> HostFault:
    """The hosts of the job that the scheduler has lost, or else that do not answer: none where none or all do not, then
    it is not the hosts' fault.

    Args:
        twice: whether those that did not answer are asked once more, since they would be left out for good.
    """
    if lost := lost_hosts(last_attempt(job), allocation):
        return HostFault(", ".join(lost.values()), tuple(lost))
    found = allocation.backend.silent(SILENT)
    if not 0 < len(found) < allocation.backend.count:
        return HostFault()
    if twice:
        again = allocation.backend.silent(SILENT)
        found = [host for host in found if host in again]
    if not found:
        return HostFault()
    return HostFault(f"no answer from {', '.join(found)}: is it up, and its network?", tuple(found))


def _tell(job: RunJob, allocation: Allocation, error: HpcrlError) -> None:
    """Leave the error with the scheduler if it cannot be written down: the run directory holds the job's own output
    too."""
    if write_obstacle(job.root):
        with contextlib.suppress(HpcrlError):
            allocation.mark(job.identity, str(error))


def _broken_host(job: RunJob) -> tuple[str, str] | None:
    """(host, what was seen) if the last attempt failed on hardware; noted for later starts."""
    if found := seen_broken(job):
        note_broken_host(job.root, *found)
        say(
            f"host {found[0]} is broken and is left out at this run's next starts (see {job.root / BROKEN}): {found[1]}"
        )
    return found


def _start_elsewhere(job: RunJob, allocation: Allocation, host: str, said: str, ends: float | None = None) -> None:
    """Have the run continue without a host that is broken: in the chain's next job, or in a new job, since one that is
    queued again keeps its request."""
    hosts, record = broken_hosts(job.root), read_job(job.root)
    why = f"host {host} is broken ({said})"
    following = later_jobs(msgspec.structs.replace(record, job_id=allocation.job_id))
    try:
        for number in following:
            allocation.leave_out(number, hosts)
    except HpcrlError as error:
        say(f"{why}; Slurm does not leave it out: {error}")
    if following or record.site is None or int(os.environ.get("HPCRL_MAX_REQUEUES", "0")) < len(hosts):
        _requeue(job, allocation, why, ends)
        return
    if any((job.root / name).exists() for name in (CANCEL, STOP)):
        return  # a new job would not know of it
    try:
        following_job = allocation.continue_elsewhere(job.root, record)
    except HpcrlError as error:
        say(f"{why}; no new job could be submitted: {error}; continue with hpcrl resume {job.root}")
        return
    JobStateFile(job.root, 0).set("requeued", message=why)
    say(f"{why}; job {following_job} continues without it")


def _preempted(job: RunJob, allocation: Allocation) -> bool:
    """Whether the scheduler, and not the user, wanted the job's nodes back."""
    return not (job.root / STOP).exists() and allocation.preempted()


def final_summary(job: RunJob) -> dict[str, Any]:
    """The last stage's summary.json."""
    summary = read_summary(job.directory(job.recipe.stages[-1]))
    return {} if summary is None else msgspec.to_builtins(summary)


def stopped(summary: dict[str, Any]) -> bool:
    """Whether what `run_in_job` returns is of a run that saved and ended early."""
    return summary.get("status") == "stopped"


def _requeue(job: RunJob, allocation: Allocation, why: str, ends: float | None = None) -> None:
    """Queue the job again and wait to be ended; returns if it was cancelled, the limit is reached, or the scheduler
    refuses.

    Args:
        ends: its time limit in Unix seconds, as far as that is known.
    """
    if (job.root / CANCEL).exists():
        return
    if number := hand_over(job.root, allocation.job_id):
        JobStateFile(job.root, allocation.restarts).set("requeued", message=why)
        say(f"{why}; job {number} of the chain continues")
        return
    restarts = allocation.restarts
    limit = int(os.environ.get("HPCRL_MAX_REQUEUES", "0"))
    if restarts >= limit:
        say(
            f"{why}; not queued again: {restarts} of {limit} requeues are used up; continue with hpcrl resume "
            f"{job.root}"
        )
        return
    JobStateFile(job.root, restarts).set("requeued", message=why)  # before, since we may be ended at once
    try:
        _ask_until_answered(job, allocation, why, ends)
    except AlreadyRequeued as error:
        say(f"{why}; Slurm is queueing it again by itself ({error.what})")
    except HpcrlError as error:
        more = f"Slurm does not requeue it: {error}; continue with hpcrl resume {job.root}"
        JobStateFile(job.root, restarts).set("stopped", message=f"{why}; {more}")
        say(f"{why}; {more}")
        return
    else:
        say(f"{why}; queued again ({restarts + 1} of {limit} requeues)")
    time.sleep(PARTING)


def _ask_until_answered(job: RunJob, allocation: Allocation, why: str, ends: float | None) -> None:
    """Queue the job again, asking for PATIENCE seconds, and not beyond its time limit, while the scheduler does not
    answer.

    Raises:
        HpcrlError: if it refuses, or gave no answer in that time; AlreadyRequeued if it was faster than the first
            request; Stopped if the job was cancelled meanwhile.
    """
    state = JobStateFile(job.root, allocation.restarts)
    now = time.time()
    until = now + PATIENCE if ends is None else min(now + PATIENCE, ends - LOOK)
    silent = False

    def ask() -> None:
        nonlocal silent
        if silent and (job.root / CANCEL).exists():
            raise Stopped("it was cancelled")
        try:
            allocation.requeue()
        except AlreadyRequeued:
            if not silent:  # else a request that had no answer was carried out all the same
                raise
        except SchedulerSilent:
            silent = True
            raise

    def tell(error: Any) -> None:
        if state.phase != "requeued":
            say(f"{why}; Slurm does not answer ({error.what}): retrying until {_clock(until)}")
        state.set("requeued", message=f"{why}; Slurm does not answer yet: retrying until {_clock(until)}")

    retry(ask, SchedulerSilent, Deadline(until - now), Pauses(AGAIN, AGAIN), failed=tell)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%SZ", time.gmtime(at))


def refuse_other_options(job: RunJob, overrides: dict[str, Any]) -> None:
    """Raise UsageError if the run began with other options: it resumes with those, and these have no effect.
    --live-code has (`_switch_code`)."""
    begun, given = read_recipe_file(job.root).overrides, msgspec.to_builtins(overrides)
    names = sorted({*begun, *given} - {"run_dir"})  # the directory is this one, however it is written
    names = [name for name in names if split_name(name)[1] != "live_code"]
    if other := next((name for name in names if begun.get(name) != given.get(name)), None):
        raise UsageError(
            f"{stage_flag(*split_name(other))}: {job.root} is a run that began with other options, and resumes with "
            "those",
            "name another --run-dir for a new run",
        )


def _switch_code(root: Path, live: bool | None) -> None:
    """Have a run that a script starts again import its custom functions as the script says; None: as before."""
    resume_code(root, None if live == (root / LIVE).exists() else live)


def batch_main(argv: list[str], here: Callable[[], Allocation]) -> int:
    """Start the RECIPE of the words in their --run-dir, or resume it if this job has been there before; the exit
    status.

    Args:
        here: opens the allocation of this process.

    Raises:
        UsageError: if there is none.
    """
    try:
        overrides, _, words = parse_flags(argv)
        if len(words) != 1 or "run_dir" not in overrides:
            raise UsageError("a recipe and --run-dir are needed", "see the last line of the batch script")
        root = Path(overrides["run_dir"])
        allocation, begin = here(), None
        if is_run(root):
            job = reopen_job(root)
            refuse_other_options(job, overrides)
            begin = partial(_switch_code, job.root, overrides.get("live_code"))
        else:
            if allocation.restarts:
                discard_unbegun(root)
            job = begin_job(load_recipe(words[0]), overrides, lambda _: allocation.nodes(), here=False)
        write_job(job.root, job.identity, "slurm", allocation.job_id, cluster=allocation.cluster)
        allocation.mark(job.identity)
        return Stopped.exit_code if stopped(run_in_job(job, allocation, begin)) else 0
    except HpcrlError as error:
        print(f"hpcrl: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
