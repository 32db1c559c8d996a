"""`hpcrl stop` saves a checkpoint and ends a run; `hpcrl cancel` ends it at once.

Invariants: a job or a process is touched only if it still is this run's: a Slurm job by the identity that it
carries, in a directory of the caller's own, since everybody can read a job's number and identity and write them into
another; a process by the run directory's lock that it holds.  A launcher that lives has the last word on its run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import msgspec
import psutil

from hpcrl.cli.find_run import Jobs, find_run, look_at_run, owner
from hpcrl.errors import HpcrlError
from hpcrl.launch.requeue import later_jobs
from hpcrl.launch.slurm import jobs as slurm
from hpcrl.launch.slurm.squeue import there
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import FRESH, WORKING, Status
from hpcrl.report.status_text import shorten_path
from hpcrl.run.job_files import CANCEL, CANCELLED, JOB, OVER, STOP, JobState, write_state
from hpcrl.run.owners import of_another_user
from hpcrl.run.queued_job import JobKey
from hpcrl.utils.arguments import RUN, Parser
from hpcrl.utils.untrusted_files import touch

BETWEEN = 0.5  #: seconds between the two SIGTERMs that a launcher takes for "now"
GRACE = 30.0  #: seconds that a launcher may take to end after them


def _word(name: str, description: str, argv: list[str]) -> str:
    parser = Parser(name, description)
    parser.add_argument("run", metavar="RUN", help=RUN)
    return parser.parse_args(argv).run


# ---- hpcrl stop


def stop(argv: list[str]) -> int:
    """`hpcrl stop`: ask the launcher to save a checkpoint and end.

    Raises:
        HpcrlError: if none is alive to do so.
    """
    given = _word("stop", "Let a run finish its step, save a checkpoint and end; continue it with hpcrl resume.", argv)
    run = find_run(given)
    jobs = Jobs([run])
    found = look_at_run(run, jobs)
    name, word = shorten_path(str(run.root)), jobs.word(run)
    in_queue = word is not None and not word.over  # its launcher looks for the file once it has come up
    if found.stop_asked:
        with contextlib.suppress(OSError):  # what was asked before this start would not hold for it
            os.utime(run.root / STOP, follow_symlinks=False)
        print(f"{name} is already stopping; to end it now: hpcrl cancel {name}")
        return 0
    if found.phase not in WORKING:
        hint = "there is nothing to stop" if found.phase in OVER else f"see hpcrl logs {name}"
        if found.phase in ("pending", "requeued") or in_queue:
            hint = f"take its job out of the queue with hpcrl cancel {name}"
        raise HpcrlError(f"{name} is not running: it is {_spell(found)}", hint)
    if run.state is None and not in_queue:
        if (process := owner(run.root)) is None:
            raise HpcrlError(
                f"{name} seems to run, but not on this host", f"stop it there, or end it: hpcrl cancel {name}"
            )
        process.send_signal(signal.SIGTERM)
    else:
        try:
            touch(run.root / STOP)
        except OSError as error:
            raise HpcrlError(f"cannot write {run.root / STOP}: {error.strerror}", f"hpcrl cancel {name}") from error
    print(f"asked {name} to save and end; hpcrl watch {name} shows when it has")
    return 0


def _refuse_of_another(run: Run) -> None:
    """Raise HpcrlError unless the run directory, and what it says of its job, are this user's own."""
    for path in (run.root, run.root / JOB):
        if other := of_another_user(path):
            raise HpcrlError(
                f"{shorten_path(str(path))} belongs to user {other}, and may name any job as its own",
                f"ask that user to cancel it, or cancel it by its number: {run.job.job_id if run.job else ''}",
            )


def _later_jobs(run: Run) -> list[str]:
    """The later jobs of its chain that Slurm knows as this run's, the last first."""
    assert run.job is not None
    numbers = later_jobs(run.job)
    keys = [JobKey(name, run.identity, run.job.submitted, history=False) for name in numbers]
    words = slurm.query_jobs(keys).jobs if keys else {}
    return [key.job_id for key in reversed(keys) if (word := words.get(key)) and not word.over]


def _spell(found: Status) -> str:
    return f"{found.phase} ({found.message})" if found.message and found.phase in ("pending", "lost") else found.phase


# ---- hpcrl cancel


def cancel(argv: list[str]) -> int:
    """`hpcrl cancel`: end the run at once.

    Raises:
        HpcrlError: if there is nothing to end, or it is out of reach.
    """
    word = _word("cancel", "End a run without saving, or take it out of the queue; its last checkpoint is kept.", argv)
    run = find_run(word)
    if run.job and run.job.queued:
        return _cancel_job(run)
    return _end_process(run)


def _cancel_job(run: Run) -> int:
    name, job = shorten_path(str(run.root)), run.job
    assert job is not None
    if not job.job_id:
        raise HpcrlError(f"{name} has no job ID", f"see {run.root / 'job.json'}")
    called = f"Slurm job {job.job_id}"
    if not there():
        raise HpcrlError(
            f"{name} is {called}, and Slurm's commands are not here",
            f"cancel it on {job.submit_host or 'its cluster'}",
        )
    jobs = Jobs([run])
    word = jobs.word(run)
    if word is None:
        raise HpcrlError(jobs.note or "Slurm does not answer", "try again")
    if word.over:
        what = f"job {job.job_id} in the queue is not of this run" if word.foreign else look_at_run(run, jobs).phase
        raise HpcrlError(f"{name}: nothing to cancel: {what}", "hpcrl status shows how it ended")
    _refuse_of_another(run)
    with contextlib.suppress(OSError):  # a directory that cannot be written to does not keep the job from being ended
        touch(run.root / CANCEL)
    try:
        for number in (*_later_jobs(run), job.job_id):  # or else the next of a chain would start
            slurm.cancel(number)
    except HpcrlError:
        (run.root / CANCEL).unlink(missing_ok=True)
        raise
    if not word.started:
        _record_waiting(Run(run.root))
    print(f"cancelled {called} of {name}" + ("" if word.started else ", which had not started"))
    return 0


def _record_waiting(run: Run) -> None:
    """The last word on a run that waited when it was cancelled, unless its launcher has begun meanwhile, and speaks."""
    state, since = run.state, run.job.submitted if run.job else 0.0
    working = state and state.phase in WORKING and time.time() - state.time < FRESH
    ended = state and state.phase in OVER and state.time > since
    if not working and not ended:
        _record(run, "cancelled while it waited in the queue")


def _record(run: Run, message: str) -> None:
    """The last word on a run whose launcher never was, or is gone, and could not know that it was cancelled."""
    last = run.state or JobState("cancelled", 0.0)
    write_state(
        run.root, msgspec.structs.replace(last, phase="cancelled", message=message, time=time.time(), ends=None)
    )


def _end_process(run: Run) -> int:
    """SIGTERM twice to the launcher on this host; it ends all its processes."""
    name = shorten_path(str(run.root))
    process = owner(run.root)
    if process is None:
        found = look_at_run(run)
        there = run.state.host if run.state else ""
        if found.phase in WORKING and there and there != socket.gethostname():
            raise HpcrlError(f"{name} runs on {there}, and this is {socket.gethostname()}", f"cancel it on {there}")
        raise HpcrlError(
            f"{name}: nothing to cancel: it is {_spell(found)}", "no process of this run was found on this host"
        )
    try:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(BETWEEN)
        if process.is_running():
            process.send_signal(signal.SIGTERM)
        process.wait(GRACE)
    except psutil.NoSuchProcess:
        pass  # it was faster
    except psutil.AccessDenied as error:
        raise HpcrlError(
            f"process {process.pid} of {name} belongs to another user", "ask that user to end it"
        ) from error
    except psutil.TimeoutExpired as error:
        raise HpcrlError(
            f"process {process.pid} of {name} did not end within {GRACE:.0f} s", f"see hpcrl logs {name}"
        ) from error
    after = Run(run.root)
    if after.state and after.state.pid == process.pid and after.state.phase not in ("finished", "stopped"):
        _record(after, CANCELLED)
    print(f"ended {name} (process {process.pid})")
    return 0
