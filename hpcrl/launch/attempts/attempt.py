"""One attempt, seen from the launcher: start its processes on the hosts, watch them.

Invariants: an attempt has succeeded only if the trainer says so in summary.json and every host ended well (an exit code
of 0 alone proves nothing: srun, for one, returns it after a node failure); what is left of one that has failed is in
`HeldHosts`, for the next one, or to be ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError, Interrupted, PeerError, Stopped, UsageError, failure_kind
from hpcrl.launch.attempts.host_processes import HeldHosts, HostProcess, is_of
from hpcrl.launch.host import CLOSING, HOST_BEAT
from hpcrl.launch.roles import GRACE
from hpcrl.launch.standalone_engine import borrow
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host, Plan, make_plan
from hpcrl.report.file_tail import last_lines
from hpcrl.report.timeline.spans import FOLDER, merged_of
from hpcrl.run.copies_directory import tell_first
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.heartbeat import LEAST, HeartbeatMonitor
from hpcrl.run.peers import TrainerPeer, find
from hpcrl.run.role import LAST_WORDS, last_error
from hpcrl.run.rundir import BEATS, HOSTS, RunDir, listed, write_atomic
from hpcrl.run.storage_errors import describe, remedy, write_obstacle
from hpcrl.run.summary import Summary, summary_of
from hpcrl.transport.auth import make_keys
from hpcrl.utils.long_work import work_in_turns
from hpcrl.utils.untrusted_files import SAMPLES, count_of, open_append, read_regular
from hpcrl.utils.waiting import Deadline, LastSign

LOOK = 1.0  #: seconds between two looks of the launcher into the run directory
ENDING = 2 * CLOSING + GRACE  #: seconds that hosts may take to end once the run is over


class HostsSilent(DeadlineError):
    """Hosts of the job do not answer, or are not there any more: another allocation may do better."""


class Backend(Protocol):
    """How processes come to hosts.

    Attributes:
        left_out: hosts that are used no more.
        python: the interpreter that `prepare` commands have there, in a container its own.
    """

    python: str
    left_out: Sequence[str]

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        """The hosts of the run, in order, spare ones among them, each with address and interface.  Errors name the
        host that does not answer."""

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> Sequence[HostProcess]:
        """Start every host's part of the plan, which is in the run directory."""

    def leave_out(self, hosts: Sequence[str]) -> None:
        """Use these hosts no more."""

    def again(self, root: Path) -> str:
        """The command that resumes a run."""

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command that makes what the run needs, once, where the run's software is."""


class BatchBackend(Backend, Protocol):
    """The hosts of a scheduler's job, some of which may be lost.

    Attributes:
        count: how many there are.
    """

    count: int

    def silent(self, seconds: float) -> list[str]:
        """The hosts that cannot start a task within `seconds`."""


def run_attempt(
    options: Options,
    backend: Backend,
    run_id: str,
    rundir: RunDir,
    stop: StopRequest,
    poll: Callable[[], None],
    held: HeldHosts,
    first: int,
) -> Summary:
    """Run one attempt to its end and return its summary.

    poll is called about five times a second.

    Args:
        held: the hosts of the attempt before, where they wait for this one; those of this one, once it has begun.
        first: the attempt with which this launcher began.

    Raises:
        PeerError: names the role that failed.
        DeadlineError: says that a stop was asked for and did not come in time.
    """
    continues = held.carried is not None
    try:
        work_in_turns(rundir.make_attempt, poll)
        tell_first(rundir, first)
        begin_tidying(rundir)
        if not continues:
            held.hosts = backend.hosts(options, rundir)
        write_atomic(rundir.here / HOSTS, msgspec.json.encode(held.hosts))
        plan = _planned(options, backend, held, run_id, rundir)
        write_atomic(rundir.plan_file, msgspec.json.encode(plan))
        make_keys(rundir, options.data_parallel_size, bool(held.engines))
        if held.lent is not None:
            held.lent.close()
        held.lent = borrow(rundir, plan, options)
        if continues:
            held.begin_again(rundir, plan)
        else:
            held.members += backend.start(options, plan, rundir)
        _watch(held.members, plan.needed_hosts, options, rundir, stop, poll)
    except Stopped:
        raise
    except (HpcrlError, OSError) as error:  # a file system that has just failed may work again
        if stop.requests and not held.members:
            raise _stopped_early(stop) from error  # whom the scheduler ends with us has no other answer to give
        what = f"attempt {rundir.attempt} of {rundir.root}"
        ours = error if isinstance(error, HpcrlError) else HpcrlError(f"{what}: {describe(error)}", remedy(error))
        rundir.fail("launcher", 0, str(ours), failure_kind(error))  # unless a role has said more already
        if ours is error:
            raise
        raise ours from error
    summary = summary_of(rundir)
    assert summary is not None  # _watch does not return without it
    return summary


def _planned(options: Options, backend: Backend, held: HeldHosts, run_id: str, rundir: RunDir) -> Plan:
    """The attempt's plan.

    Raises:
        HostsSilent: if an earlier stage has lost hosts of the job, and those that are left hold none: another
            allocation does better.
    """
    try:
        return make_plan(options, held.hosts, run_id, rundir.attempt, held.kept)
    except UsageError as error:
        if not backend.left_out:
            raise
        raise HostsSilent(f"without {', '.join(backend.left_out)}: {error.what}", error.hint) from error


def _watch(
    members: list[HostProcess],
    hosts: Sequence[str],
    options: Options,
    rundir: RunDir,
    stop: StopRequest,
    poll: Callable[[], None],
) -> None:
    """Return when all members have ended well and the trainer has summed up; raise as soon as anything has gone
    wrong.

    Args:
        hosts: those that the attempt needs.
    """
    stop_by = float("inf")
    close_by = float("inf")
    patience = options.stop_timeout
    pulse = HeartbeatMonitor(rundir.here / BEATS, here=False, look=HOST_BEAT)
    looked, over = LastSign(ago=LOOK), False
    needed = [m for m in members if not m.expendable]
    while not over or any(m.status is None for m in needed):
        poll()
        # at once where a host has ended or a user waits; else seldom: the directory is shared by all hosts
        if stop.requests or looked.due(LOOK) or any(m.status is not None for m in needed):
            _check(members, rundir)
            over = summary_of(rundir) is not None
        _check_hosts(pulse, hosts, options.hang_timeout, rundir)
        now = time.monotonic()
        if over and close_by == float("inf"):
            close_by = now + ENDING
        if now > close_by and not _hosts_at_work(rundir, hosts):
            return  # but what stands for them still waits for a host that was left out
        if now > close_by:
            late = ", ".join(m.name for m in needed if m.status is None)
            raise DeadlineError(f"{late} did not end within {ENDING:.0f} s after the run was over", "all is saved")
        if stop.requests and find(rundir, TrainerPeer) is None:
            raise _stopped_early(stop)
        if stop.requests and stop_by == float("inf"):
            rundir.request_stop()
            patience = stop.seconds or options.stop_timeout
            stop_by = now + patience
        if stop.requests > 1:
            raise Interrupted("ended without saving on a second signal: the last checkpoint is kept")
        if now > stop_by and not over:
            raise DeadlineError(
                f"the run did not save and end within {patience:.0f} s",
                "it was ended; the last checkpoint is good; if a step takes longer, raise --stop-timeout",
            )
        time.sleep(0.2)
    _check(members, rundir)


def _hosts_at_work(rundir: RunDir, hosts: Sequence[str]) -> bool:
    """Whether the process of a host of the plan still gives signs of life: it takes them away as it ends."""
    return any(is_of(name, host) for name in listed(rundir.here / BEATS) for host in hosts)


def _stopped_early(stop: StopRequest) -> Stopped:
    """The backend of the run says how to resume it."""
    reason = f" ({stop.why})" if stop.why else ""
    return Stopped(f"stopped while starting{reason}: nothing was trained since the last checkpoint")


def _check_hosts(pulse: HeartbeatMonitor, hosts: Sequence[str], seconds: float, rundir: RunDir) -> None:
    """PeerError, recorded, if the process of a host of the plan hangs, which would notice nothing of what happens
    there; a spare host is looked for when it is needed."""
    for silent in pulse.silent(max(seconds, LEAST) + HOST_BEAT):
        if not any(is_of(silent.name, host) for host in hosts):
            continue
        what = f"the process of host {silent.name} {silent}"
        if said := write_obstacle(rundir.here):  # where we cannot write, neither can it
            raise PeerError(f"{said}; no host can report that it is alive there", "the last checkpoint is good")
        rundir.fail("launcher", 0, what)
        raise PeerError(what, "is the host, or its network, down? if it is only slow, raise --hang-timeout")


def _missed(members: list[HostProcess], over: bool) -> list[HostProcess]:
    """The members whose end is the attempt's: those that it needs, and the last that has sandboxes, if they all have
    ended before the run."""
    needed = [m for m in members if not m.expendable]
    others = [m for m in members if m.expendable]
    return members if others and not over and all(m.status is not None for m in others) else needed


def _check(members: list[HostProcess], rundir: RunDir) -> None:
    """Raise PeerError if a member has failed or lost a host, or has ended, however well, before the run did."""
    over = summary_of(rundir) is not None
    members = _missed(members, over)
    if not over and (lost := next(filter(None, (m.lost() for m in members)), "")):
        rundir.fail("launcher", 0, lost)  # the others, whom that ends too, wait for this word
        rundir.check()
        raise PeerError(lost)
    gone = [m for m in members if m.status is not None and (m.status != 0 or not over)]
    if not gone:
        rundir.check()
        return
    end_of_wait = Deadline(3.0)  # the host that knows why may be about to say so
    while rundir.failure() is None and not end_of_wait.over:
        if summary_of(rundir) is not None and all(m.status == 0 for m in gone):
            return  # it had ended after all, and its last word has only now come to us
        time.sleep(0.05)
    rundir.check()
    assert gone[0].status is not None
    how = how_it_ended(gone[0].status, gone[0].memory)
    said = last_error(last_lines(gone[0].log, LAST_WORDS)) if gone[0].status > 0 else ""
    why = (
        write_obstacle(rundir.here)
        or f"{f'it says: {said}' if said else 'a host may have failed'}; its log is {gone[0].log}"
    )
    message = f"{gone[0].name} {how} before the run was over; {why}"
    rundir.fail("launcher", 0, message)
    raise PeerError(message)


# ---- what earlier attempts left
#
# What attempts that are over have left in a run directory, thinned out: a start on 512 hosts leaves some 4,000 files,
# and a run is started again tens of times.
#
#     attempts/N/hosts, doctor, answers-*   needed at the start alone: removed when another attempt begins
#     attempts/N/peers                      addresses and keys: removed when two more have begun
#     timeline/attempt-N/*.jsonl            then become timeline/attempt-N.jsonl
#
# Invariants: the last two attempts stay, without files that only their start needed; a directory goes only
# once the file with all of it is whole, on disk and in its place; nothing here ends or delays a run: what could not be
# done is left to the next start.

KEPT = 2  #: attempts that stay as they are, the one that begins among them
START = ("hosts", "doctor")  #: directories of attempts/N that are read by its start alone, and
ANSWERS = "answers-"  #: how the names of others begin


def begin_tidying(rundir: RunDir) -> threading.Thread:
    """Tidy up after the attempts before this one, while it comes up."""
    thread = threading.Thread(target=tidy, args=(rundir,), name="tidy", daemon=True)
    thread.start()
    return thread


def tidy(rundir: RunDir) -> None:
    """Remove and merge what the attempts before `rundir.attempt` have left."""
    numbers = (count_of(name) for name in listed(rundir.root / "attempts"))
    for number in sorted(n for n in numbers if n is not None and n < rundir.attempt):
        with contextlib.suppress(OSError):
            _tidy_one(RunDir(rundir.root, number), merged=number <= rundir.attempt - KEPT)


def _tidy_one(old: RunDir, merged: bool) -> None:
    """Remove what the start of an attempt that is over left; of one further back its peers too, and merge its
    timelines.  OSError."""
    for name in listed(old.here):
        if name in START or name.startswith(ANSWERS) or (merged and name == "peers"):
            shutil.rmtree(old.here / name)
    timelines = old.root / FOLDER / old.logs.name
    if merged and timelines.is_dir():
        merge_timelines(timelines)


def merge_timelines(folder: Path) -> None:
    """Put the timelines of an attempt into one file, one after another, and remove their directory.

    Raises:
        OSError: then the directory is still there; one that was merged before is removed.
    """
    place = merged_of(folder)
    if not place.exists():
        temporary = place.with_name(f".{place.name}")
        temporary.unlink(missing_ok=True)  # of a launcher that ended meanwhile
        with open_append(temporary) as out:
            for path in sorted(folder.glob("*.jsonl")):
                data = read_regular(path, SAMPLES)
                out.write(data[: data.rfind(b"\n") + 1])  # without a line that a crash has torn
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(place)
    shutil.rmtree(folder)
