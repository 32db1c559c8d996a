"""A stage's attempts in one job: after a failure the next begins at once, on the hosts that the job holds.

Invariants: a stop that was asked for, a time limit that is near and a cause that another attempt does not remove are
never followed by one (`retries.py`, `progress.py`, and what the job's scheduler knows); the error that a job ends with
is that of its last attempt; no process outlives the call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError, Stopped, UsageError
from hpcrl.launch.attempts.attempt import Backend, run_attempt
from hpcrl.launch.attempts.excluded_hosts import leave_out
from hpcrl.launch.attempts.host_processes import HeldHosts
from hpcrl.launch.attempts.progress import check_headway, position
from hpcrl.launch.attempts.retries import FailedAttempt, HostFault, is_final, reason_to_end
from hpcrl.launch.attempts.smaller_settings import Smaller, next_smaller
from hpcrl.launch.attempts.spare_hosts import without
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Plan, make_plan
from hpcrl.report.metrics import last_records
from hpcrl.report.progress import say
from hpcrl.run.attempt_log import lowered_settings, note_failed, note_lowered, unended
from hpcrl.run.code_files import how_to_fix
from hpcrl.run.copies_directory import tell_followed
from hpcrl.run.peers import TrainerPeer, find
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import AttemptFailure, RunDir, write_atomic
from hpcrl.run.storage_errors import write_obstacle
from hpcrl.run.summary import Summary, read_summary
from hpcrl.utils.long_work import work_in_turns
from hpcrl.utils.waiting import Deadline

DISK = 120.0  #: seconds that a file system which takes nothing has to get over it
LOOK = 1.0  #: seconds between two looks meanwhile

#: (the error, whether every host has said that it is well, host -> what cannot be killed there) -> why the run does not
#: continue on the job's hosts
Leave = Callable[[HpcrlError, bool, Mapping[str, str]], HostFault]


def stay(error: HpcrlError, well: bool, stuck: Mapping[str, str]) -> HostFault:
    """`Leave` of a launcher without a scheduler."""
    return HostFault(", ".join(stuck.values()), tuple(stuck))


@dataclass
class StageAttempts:
    """The attempts of one stage in this job.

    Attributes:
        root: the run's directory, in which its headway is noted.
        observe: a context for each attempt, which gives what is called about five times a second in it.
        turn: what is called as often between two of them.
    """

    options: Options
    backend: Backend
    run_id: str
    root: Path
    stop: StopRequest
    observe: Callable[[RunDir], AbstractContextManager[Callable[[], None]]]
    turn: Callable[[RunDir], None]
    leave: Leave = stay
    held_hosts: HeldHosts = field(default_factory=HeldHosts)
    failed: list[FailedAttempt] = field(default_factory=list)
    _position: list[str] = field(default_factory=list)  #: what had been saved at the last failure
    _fruitless: int = 0  #: failures since then

    def run(self, rundir: RunDir) -> Summary:
        """Bring the stage to its end, beginning with this attempt.

        Raises:
            HpcrlError: of the last attempt, which no other follows.
        """
        _note_unrecorded(rundir)
        try:
            while True:
                try:
                    return self._attempt(rundir)
                except Stopped:
                    raise
                except HpcrlError as error:
                    self._continue_after(error, rundir)
                rundir = RunDir(rundir.root, rundir.attempt + 1)
        finally:
            self.held_hosts.end(rundir, lambda: self.turn(rundir), lambda: self.stop.requests > 1)

    @property
    def _outlives(self) -> bool:
        """Whether the job is to continue without a host that is lost."""
        return self.options.spares > 0

    def _attempt(self, rundir: RunDir) -> Summary:
        with self.observe(rundir) as poll:
            first = rundir.attempt - len(self.failed)
            return run_attempt(self.options, self.backend, self.run_id, rundir, self.stop, poll, self.held_hosts, first)

    def _continue_after(self, error: HpcrlError, rundir: RunDir) -> None:
        """Return once another attempt may begin; raise the error where none does."""
        if self.stop.requests:  # it was to save and end, and did not: the caller knows what that means
            raise error
        begun = bool(self.held_hosts.members)
        turn = lambda: self.turn(rundir)  # noqa: E731
        self.failed.append(self._look_at(rundir))
        if fix := how_to_fix(self.root, self.failed[-1].failure, self.backend.again(self.root)):
            error = PeerError(error.what, fix)
        turn()
        if (here := work_in_turns(lambda: position(self.root), turn)) != self._position:
            self._position, self._fruitless = here, 0
        turn()
        lowered = lowered_settings(rundir.root)
        smaller = next_smaller(self.options, self.failed[-1].failure, [one.setting for one in lowered])
        self._fruitless += smaller is None
        why = "" if smaller else reason_to_end(self.failed, self.options.attempts, self._fruitless)
        why += "".join(f"; lowered before: {one.what}" for one in lowered if why)
        final = not self._outlives or is_final(self.failed, self.options.attempts, self._fruitless)
        self._raise_final(error, (why if final else "") if begun else "its hosts could not be had")
        self._raise_final(error, self._full_disk(rundir))
        self.held_hosts.pause(rundir, turn)
        paused = bool(self.held_hosts.members)
        fault = self.leave(error, paused and not self.held_hosts.absent, self.held_hosts.stuck)
        plan = self._without(fault, rundir)
        self._raise_final(error, (fault.why or why) if plan is None or not fault.hosts else "")
        turn()
        try:
            work_in_turns(lambda: None if smaller else check_headway(self.root, 1), turn)
        except HpcrlError as fruitless:
            self._raise_final(error, fruitless.what)
        say(f"attempt {rundir.attempt} failed: {error.what}")
        if smaller:
            self._lower(smaller, rundir)
        if fault.hosts:
            self.held_hosts.hosts = leave_out(self.held_hosts.hosts, fault.hosts, fault.why, rundir)
            self.backend.leave_out(fault.hosts)
        if plan is not None and paused and self.held_hosts.absent <= set(fault.hosts):
            self.held_hosts.carry(plan, engines=not (smaller and smaller.engines))
        else:
            tell_followed(rundir)
            self.held_hosts.end(rundir, turn, lambda: self.stop.requests > 1)
        self._raise_final(error, "")
        number = len(self.held_hosts.engines)
        engines = f"; {number} engine{'s' * (number > 1)} continue{'s' * (number == 1)}" if number else ""
        where = f"without {', '.join(fault.hosts)}" if fault.hosts else "on the same hosts"
        say(f"attempt {rundir.attempt + 1} begins {where}{engines}")

    def _lower(self, smaller: Smaller, rundir: RunDir) -> None:
        """Have the attempts after this one use less."""
        last = self.failed[-1]
        assert last.failure is not None, "it is why"
        what = f"{smaller.text}, as {last.failure.role}-{last.failure.index} ran out of memory"
        self.options = self.options.model_copy(update=smaller.update)
        write_atomic(rundir.options_file, self.options.model_dump_json(indent=1).encode())
        note_lowered(rundir, last.step, smaller.setting, what)
        say(f"from now on {what}")

    def _without(self, fault: HostFault, rundir: RunDir) -> Plan | None:
        """The plan of the next attempt without the hosts at fault; None if there is none."""
        if fault.why and not (fault.hosts and self._outlives):
            return None
        hosts = without(self.held_hosts.hosts, fault.hosts)
        try:
            return make_plan(self.options, hosts, self.run_id, rundir.attempt + 1, self.held_hosts.kept)
        except UsageError:
            if self.options.spares:
                say("no spare host is left")
            return None

    def _raise_final(self, error: HpcrlError, why: str) -> None:
        """Raise the error if there is a reason why, Stopped if the run was asked to stop meanwhile."""
        if self.stop.requests:
            reason = f" ({self.stop.why})" if self.stop.why else ""
            raise Stopped(f"stopped{reason} after a failure: {error.what}; the last checkpoint is good") from error
        if why and self.options.attempts > 1:
            say(f"no other attempt follows in this job: {why}")
        if why:
            raise error

    def _look_at(self, rundir: RunDir) -> FailedAttempt:
        """How the attempt has ended, as far as that can be read."""
        failure = peer = None
        with contextlib.suppress(HpcrlError):
            failure = rundir.failure()
        with contextlib.suppress(HpcrlError):
            peer = find(rundir, TrainerPeer)
        last = last_records(rundir.metrics_file, 1)
        step = last[-1]["rollout_id"] + 1 if last else 0
        found = FailedAttempt(failure, max(step, peer.start if peer else 0), peer is not None)
        note_failed(rundir, found.step, failure, _host_of(rundir, failure))
        return found

    def _full_disk(self, rundir: RunDir) -> str:
        """Why nothing can be written there, once that has not passed for DISK seconds; "" as soon as something can."""
        deadline = Deadline(DISK)
        told = False
        while why := write_obstacle(rundir.root):
            if deadline.over or self.stop.requests:
                return why
            if not told:
                say(f"{why}; waiting for up to {DISK:.0f} s")
            told = True
            self.turn(rundir)
            time.sleep(LOOK)
        return ""


def _note_unrecorded(rundir: RunDir) -> None:
    """Note that the attempt before a job's first one has failed, where its launcher was killed and could not."""
    before = RunDir(rundir.root, rundir.attempt - 1)
    with contextlib.suppress(HpcrlError, OSError):
        ready = unended(before)
        if ready is None or ((summary := read_summary(before.root)) and summary.attempt >= before.attempt):
            return
        last = last_records(before.metrics_file, 1)
        time = before.metrics_file.stat().st_mtime if last else ready.time
        failure = before.failure() or AttemptFailure("launcher", 0, "the launcher was killed", time)
        step = max(ready.step, last[-1]["rollout_id"] + 1 if last else 0)
        note_failed(before, step, failure, _host_of(before, failure), ready.launcher)


def _host_of(rundir: RunDir, failure: AttemptFailure | None) -> str:
    """The host of the process that failed; "" where that is not one, or not known."""
    with contextlib.suppress(HpcrlError):
        plan = read_plan(rundir)
        places = {
            "trainer": plan.trainers,
            "engine": plan.engines,
            "rollout": (plan.rollout,),
            "sandbox": plan.sandboxes,
        }
        if failure and failure.index < len(found := places.get(failure.role, ())):
            return found[failure.index].host
    return ""
