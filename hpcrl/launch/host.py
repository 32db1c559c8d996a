"""The processes of one host: start its roles, watch them, end them.

    python -m hpcrl.launch.host RUN --attempt N --host NAME [--slot I]

The launcher starts one of these on every host of the plan, locally, through srun or through mpirun; with --slot there
is one for each slot, which starts only what begins on that slot.

Invariants: the first role that fails ends the attempt, on every host, and within seconds no process of it is left, but
for engines: one that fails is started again (restarters.py), and those that are well wait for the launcher to
say whether another attempt takes them over (`pause`); a host has done its part only when the trainer has said that the
run is over and every role here has ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil

from hpcrl.config.options import Options
from hpcrl.errors import EXITED, DeadlineError, HpcrlError, PeerError, failure_kind
from hpcrl.launch.attempts.run_dir_poller import RunDirPoller
from hpcrl.launch.restarters import EngineRestarter, SandboxRestarter
from hpcrl.launch.roles import GRACE, SANDBOX, Role, commands, devices, heading, start
from hpcrl.launch.stop_signals import SignalFlags
from hpcrl.plan import Plan
from hpcrl.report.timeline.spans import ROLES, role_timeline
from hpcrl.run.copies_directory import copies_directory
from hpcrl.run.engine_files import end_of, restart_limit, was_up
from hpcrl.run.gpu_counters import counting_errors
from hpcrl.run.heartbeat import FOLDER, LEAST, HeartbeatMonitor, HeartbeatWriter
from hpcrl.run.pauses import AGAIN, CarriedOver, PausedHost, follow_log, read_carried, tell_paused
from hpcrl.run.process import adopt_orphans, descendants, die_with_parent, end_descendants, end_processes, set_limits
from hpcrl.run.role import read_options, read_plan, say
from hpcrl.run.rundir import BEATS, RunDir
from hpcrl.run.scratch import Scratch, sweep
from hpcrl.utils.untrusted_files import open_append
from hpcrl.utils.waiting import Deadline, poll

HOST_BEAT = 10.0  #: seconds between two of them: each is a write to a file system that all hosts share
CLOSING = 30.0  #: seconds that the other roles may take to end once one has
CLOSING_SAVED = 10.0  #: the same in a run that was asked to stop
PAUSE = 300.0  #: seconds for which a host waits for another attempt, once one has failed
GLANCE = 0.25  #: seconds between two looks meanwhile


# ---- from start to end


class HostRoles:
    """The roles of this host, through one attempt after another.  A context: whatever happens, no process that was
    started here outlives it.

    Attributes:
        rundir: of the present attempt.
        name: of this process among the hosts'.
    """

    def __init__(self, options: Options, plan: Plan, rundir: RunDir, host: str, slot: int | None = None) -> None:
        self.options = options
        self.plan = plan
        self.rundir = rundir
        self.host = host
        self.slot = slot
        self.name = host if slot is None else f"{host}-{slot}"
        self.roles: list[Role] = []
        sweep()  # after processes of an earlier attempt that were killed
        self._made = Scratch("host")
        self._beats = self._made.path / "beats"
        self._beats.mkdir(mode=0o700)
        self._pulse = HeartbeatMonitor(self._beats)
        self._timeline = role_timeline(rundir, "host", slot or 0, host)
        self._restarter = EngineRestarter(rundir, host, 0, {}, self._start_role)
        self._sandboxes = SandboxRestarter(rundir, {}, self._start_role, {})

    def __enter__(self) -> HostRoles:
        return self

    def __exit__(self, *_: object) -> None:
        with self._timeline.span("end the roles"):
            self._end_roles(lambda role: True)
            end_descendants(0.5)
        self._timeline.close()
        self._made.remove()
        sweep()  # after supervisors of engines that were killed

    def attempt(self, told: SignalFlags, turn: Callable[[], None]) -> None:
        """Run what this host has to run in an attempt; returns when the run is over, or was asked to end.

        Raises:
            PeerError: names the role that failed, here or elsewhere.
        """
        begun = self._timeline.now()
        try:
            self._start(read_carried(self.rundir))
            self._watch(told, turn)
        finally:
            self._timeline.add(ROLES, begun, self._timeline.now())

    def _watch(self, told: SignalFlags, turn: Callable[[], None]) -> None:
        """Watch until the run is over; the end of a host that has sandboxes and nothing else is its own affair."""
        working = [r for r in self.roles if not r.serves]
        close_by = quit_by = float("inf")
        looks = RunDirPoller(self.rundir)
        while any(r.status is None for r in working) or not looks.over(at_once=bool(working)):
            turn()
            if looks.must_end() or (told.requests and self.host not in self.plan.needed_hosts):
                return
            if not looks.stopping:  # which has its own limit, and needs the trainer alone
                check_alive(self._pulse, self.options.hang_timeout, self.rundir, self.host)
            if not told.requests:
                self._restarter.restart_ended(self.roles)
                self._sandboxes.restart_ended(self.roles)
            _check(self.roles, self.rundir, told, self.host)
            now = time.monotonic()
            if told.requests and quit_by == float("inf"):
                with contextlib.suppress(OSError):
                    self.rundir.request_stop()  # time to save, if the sender of the signal leaves it
                quit_by = now + self.options.stop_timeout
            if told.requests > 1 or now > quit_by:
                raise PeerError(f"host {self.host} was ended", "the last saved checkpoint is good")
            if any(r.status is not None for r in working):
                close_by = min(close_by, now + (CLOSING_SAVED if looks.stopping and looks.is_over else CLOSING))
            if now > close_by and (late := next((r for r in working if r.status is None), None)):
                if looks.stopping and looks.is_over:
                    say(f"{late.name}-{late.index} does not end by itself; the run has saved, and is ended without it")
                    return
                raise DeadlineError(
                    f"{late.name}-{late.index} did not end within {CLOSING:.0f} s after the others", f"see {late.log}"
                )
            time.sleep(0.2)
        _check(self.roles, self.rundir, told, self.host)
        self.rundir.check()

    def _start(self, carried: CarriedOver) -> None:
        """Start the roles that do not run yet."""
        self._end_roles(lambda role: role.engine not in carried.engines)
        for role in self.roles:
            role.log = follow_log(role.log, self.rundir.logs)
            with open_append(role.log) as out:
                out.write(heading(self.rundir.attempt, self.host))
        running = {(role.name, role.index) for role in self.roles}
        ours = commands(self.options, self.plan, self.rundir, self.host, self.slot)
        engines = {index: command for name, index, command in ours if name == "engine"}
        incarnations = {index: (carried.engines | carried.begin).get(index, 0) for index in engines}
        limit = restart_limit(self.options, self.plan)
        self._restarter = EngineRestarter(
            self.rundir, self.host, limit, engines, self._start_role, incarnations, self.options.oom_retries
        )
        sandboxes = {index: command for name, index, command in ours if name == SANDBOX}
        self._sandboxes = SandboxRestarter(self.rundir, sandboxes, self._start_role, {})
        for name, index, command in ours:
            if (name, index) not in running:
                again = ["--incarnation", str(number)] if name == "engine" and (number := incarnations[index]) else []
                self.roles.append(self._start_role(name, index, [*command, *again]))

    def _start_role(self, name: str, index: int, command: list[str]) -> Role:
        gpus = devices(self.plan, name, index, self.host, self.slot, os.environ.get("CUDA_VISIBLE_DEVICES"))
        role = start(name, index, command, self.rundir, self.host, {**gpus, FOLDER: str(self._beats)})
        self._timeline.mark(f"starts {name}-{index}")
        return role

    def _end_roles(self, which: Callable[[Role], bool]) -> None:
        """End those roles, and what they have started."""
        ended = [role for role in self.roles if which(role)]
        end_processes([psutil.Process(role.process.pid) for role in ended if role.status is None], GRACE)
        self.roles = [role for role in self.roles if role not in ended]

    # ---- between two attempts

    def pause(self, told: SignalFlags, turn: Callable[[], None]) -> bool:
        """End what the failed attempt alone needed, say what lives on, and wait for the launcher's word.

        Returns:
            Whether another attempt has begun, which is the present one then.
        """
        self._end_roles(lambda role: role.engine is None or role.status is not None or not self._well(role))
        stuck = self._end_orphans()
        last = dict(self._restarter.incarnations)
        engines = {role.index: last[role.index] for role in self.roles if role.name == "engine"}
        parts = [(role.engine, role.index) for role in self.roles if role.name != "engine" and role.engine is not None]
        tell_paused(self.rundir, self.name, PausedHost(engines=engines, parts=parts, last=last, stuck=stuck))

        def word() -> str:
            turn()
            signs = self.rundir.signs()
            return "end" if told.requests or "end" in signs else AGAIN if AGAIN in signs else ""

        if poll(word, Deadline(PAUSE), GLANCE) != AGAIN:
            return False
        self._timeline.close()
        self.rundir = RunDir(self.rundir.root, self.rundir.attempt + 1)
        self.plan, self.options = read_plan(self.rundir), read_options(self.rundir)
        self._timeline = role_timeline(self.rundir, "host", self.slot or 0, self.host)
        return True

    def _well(self, role: Role) -> bool:
        """Whether another attempt may use this engine, or part of one, as it is: not one whose failure ended this
        attempt, be its processes there for a moment still, nor one that takes turns with the trainer, which may have
        died in the middle of a hand-over."""
        failure = None
        with contextlib.suppress(HpcrlError):
            failure = self.rundir.failure()
        if self.options.takes_turns or (failure and (failure.role, failure.index) == ("engine", role.engine)):
            return False
        if role.name != "engine":
            return True
        incarnation = self._restarter.incarnations[role.index]
        return was_up(self.rundir, role.index, incarnation) and end_of(self.rundir, role.index, incarnation) is None

    def _end_orphans(self) -> str:
        """End what ended roles have left; what cannot be killed, as while it waits for a disk that is gone: no other
        attempt begins on top of it."""
        end_processes(self._orphans(), 0.5)
        found = self._orphans()
        return f"on {self.host} process {found[0].pid} of the failed attempt cannot be killed" if found else ""

    def _orphans(self) -> list[psutil.Process]:
        """The processes below this one, without the roles that are left running and what they have started."""
        kept: set[int] = set()
        for role in self.roles:
            with contextlib.suppress(psutil.Error):
                kept |= {role.process.pid, *(c.pid for c in psutil.Process(role.process.pid).children(recursive=True))}
        return [child for child in descendants() if child.pid not in kept and _runs(child)]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def run_host(
    options: Options,
    plan: Plan,
    rundir: RunDir,
    host: str,
    slot: int | None,
    told: SignalFlags,
    turn: Callable[[], None] = lambda: None,
) -> None:
    """Run what this host has to run, in one attempt after another; returns when the run is over, or was asked to end.

    turn is called about five times a second.

    Raises:
        PeerError: names the role that failed, here or elsewhere. Whatever happens, no process that was started here
            outlives the call.
    """
    with counting_errors(rundir, host), HostRoles(options, plan, rundir, host, slot) as roles:
        while True:
            beats = roles.rundir.here / BEATS
            beats.mkdir(mode=0o700, exist_ok=True)
            with HeartbeatWriter(beats, roles.name, every=HOST_BEAT):
                try:
                    return roles.attempt(told, turn)
                except HpcrlError as error:
                    _record(roles.rundir, host, error)
                    if not isinstance(error, PeerError) or options.attempts == 1 or told.requests:
                        raise
                    say(f"error: on {host}: {error}")
                    if not roles.pause(told, turn):
                        raise


def _in_use(rundir: RunDir, host: str) -> bool:
    """Whether the attempt needs this host: how a spare one ends, one that was left out, or one that has sandboxes and
    nothing else, is its own affair."""
    with contextlib.suppress(HpcrlError):
        return host in read_plan(rundir).needed_hosts
    return True


def _record(rundir: RunDir, host: str, error: HpcrlError) -> None:
    """Record why this host has ended the attempt, unless a role has said more already."""
    if _in_use(rundir, host):
        rundir.fail("host", 0, f"on {host}: {error}", failure_kind(error))


def check_alive(pulse: HeartbeatMonitor, seconds: float, rundir: RunDir, host: str) -> None:
    """PeerError, recorded, if a process of this host hangs.

    Of the supervisor of an engine it is only said: its server serves on, and is missed by those who ask it. A server of
    sandboxes is ended.
    """
    for silent in pulse.silent(max(seconds, LEAST)):
        what = f"on {host}: {silent.name} {silent}; if it is only slow, raise --hang-timeout"
        if silent.name.startswith(("engine-", f"{SANDBOX}-")):
            say(what)
            if silent.name.startswith(SANDBOX):  # it is started again; its users have lost their boxes
                with contextlib.suppress(ProcessLookupError):
                    os.kill(silent.pid, signal.SIGKILL)
            continue
        role, _, index = silent.name.rpartition("-")
        rundir.fail("trainer" if role == "torchrun" else role, int(index), what)
        raise PeerError(what)


def _check(roles: list[Role], rundir: RunDir, told: SignalFlags, host: str) -> None:
    """Raise PeerError if a role has failed, or an engine has ended while it was needed."""
    gone = [r for r in roles if r.status is not None and (r.status != 0 or r.serves)]
    if not gone:
        return
    end_of_wait = Deadline(1.0)  # the role that knows why may be about to say so
    while rundir.failure() is None and not end_of_wait.over:
        time.sleep(0.05)
    rundir.check()
    message = gone[0].exit_report()
    if told.requests and gone[0].status in (-signal.SIGTERM, 128 + signal.SIGTERM):
        message = f"host {host} was ended (cancelled, preempted, out of time, or another host of the job lost)"
    rundir.fail(gone[0].name, gone[0].index, message, EXITED if (gone[0].status or 0) > 0 else "")
    raise PeerError(message)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The processes of one host; started by hpcrl, srun or mpirun.")
    parser.add_argument("run")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--host", required=True, help="this host's name in the plan")
    parser.add_argument("--slot", type=int, help="only what begins on this slot; one task for each slot")
    args = parser.parse_args(argv)
    die_with_parent()
    adopt_orphans()
    set_limits()
    rundir = RunDir(args.run, args.attempt)
    try:
        options = read_options(rundir)
        with SignalFlags() as told, copies_directory(bool(options.non_persistent_save_interval), rundir):
            run_host(options, read_plan(rundir), rundir, args.host, args.slot, told)
    except HpcrlError as error:
        say(f"error: on {args.host}: {error}")
        _record(rundir, args.host, error)
        return error.exit_code if _in_use(RunDir.latest(rundir.root), args.host) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
