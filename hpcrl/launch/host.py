"""The processes of one host in one attempt: start its roles, watch them, end them.

    python -m hpcrl.launch.host RUN --attempt N --host NAME [--slot I]

The launcher starts one of these on every host of the plan, locally, through srun or through mpirun; with --slot there
is one for each slot, which starts only what begins on that slot.

Invariants: the first role that fails ends the attempt, on every host, and within seconds no process of it is left, but
for engines, which are started again (engines/restarter.py); a host has done its part only when the trainer has said
that the run is over and every role here has ended well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, HpcrlError, PeerError
from hpcrl.heartbeat import FOLDER, LEAST, HeartbeatMonitor, HeartbeatWriter
from hpcrl.launch.broken_hosts import heading, note_kernel_words
from hpcrl.launch.engines.restarter import EngineRestarter
from hpcrl.launch.stop_signals import SignalFlags
from hpcrl.plan import NO_GPUS, Plan, visible_devices
from hpcrl.report.file_tail import last_lines
from hpcrl.report.timeline.spans import ROLES, role_timeline
from hpcrl.run.engine_files import restart_limit
from hpcrl.run.exit_status import MemoryWatch, hardware_words, how_it_ended
from hpcrl.run.gpu_environment import gpus_are_here
from hpcrl.run.process import PARENT, adopt_orphans, die_with_parent, end, end_descendants, set_limits
from hpcrl.run.role import last_error, read_options, read_plan, say
from hpcrl.run.rundir import BEATS, ERROR, OVER, STOP, RunDir
from hpcrl.run.scratch import Scratch, sweep
from hpcrl.toolbox.deadline import Deadline
from hpcrl.untrusted_files import open_append

#: begins the role's name of what an engine over several hosts has on the others: engine-INDEX-node-NODE
PART = "engine-"
GRACE = 7.5  #: seconds between SIGTERM and SIGKILL
EVERY, SELDOM = 2.5, 5  #: seconds between two looks into the run directory; every how many look for a later attempt
HOST_BEAT = 10.0  #: seconds between two of them: each is a write to a file system that all hosts share
CLOSING = 30.0  #: seconds that the other roles may take to end once one has
CLOSING_SAVED = 10.0  #: the same in a run that was asked to stop


@dataclass
class Role:
    """One started role.

    Attributes:
        memory: what the kernel had killed before it was.
    """

    name: str
    index: int
    process: subprocess.Popen[bytes]
    log: Path
    memory: MemoryWatch = field(default_factory=MemoryWatch)

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        """End it; what it has started ends with it."""
        if self.status is None:
            end([psutil.Process(self.process.pid)], GRACE)

    @property
    def serves(self) -> bool:
        """Whether it is an engine, or a part of one, which runs until it is told to end."""
        return self.name == "engine" or self.name.startswith(PART)

    def exit_report(self) -> str:
        """How it ended, for a user, with what its log says of hardware, or its own last words where it ended by
        itself."""
        log = last_lines(self.log, 200) if self.log.exists() else []
        said = hardware_words(b"\n".join(log).decode(errors="replace"))
        if said is None and self.process.returncode > 0:
            said = last_error(log)
        also = f"; it says: {said}" if said else ""
        how = how_it_ended(self.process.returncode, self.memory)
        return f"{self.name}-{self.index} {how}{also}; its log is {self.log}"


# ---- what runs here


def commands(
    options: Options, plan: Plan, rundir: RunDir, host: str, slot: int | None = None
) -> list[tuple[str, int, list[str]]]:
    """(role, index, command) of every process of `host`; with `slot`, of those that begin on this slot."""
    base = [str(rundir.root), "--attempt", str(rundir.attempt)]
    python = [sys.executable, "-m"]
    found = []
    for index, place in enumerate(plan.engines):
        if place.host == host and slot in (None, place.slots[0]):
            found.append(("engine", index, [*python, "hpcrl.engine.main", *base, "--index", str(index)]))
        for node, part in enumerate(place.also, 1):
            if part.host == host and slot in (None, part.slots[0]):
                more = ["--index", str(index), "--node", str(node)]
                found.append((f"{PART}{index}-node", node, [*python, "hpcrl.engine.follower", *base, *more]))
    if plan.rollout.host == host and slot in (None, _lowest(plan, host)):
        found.append(("rollout", 0, [*python, "hpcrl.rollout.main", *base]))
    ranks = plan.ranks_on(host)
    if options.debug_rollout_only:
        ranks = ()
        if plan.rollout.host == host and slot in (None, _lowest(plan, host)):
            found.append(("trainer", 0, [*python, "hpcrl.trainer.rollout_driver", *base]))
    if ranks and options.rank_launcher == "torchrun" and slot in (None, _lowest(plan, host)):
        number = plan.trainer_hosts.index(host)
        found.append(("trainer", ranks[0], [*python, "hpcrl.trainer.start.torchrun", *base, "--index", str(number)]))
    if options.rank_launcher == "ranks":
        mine = [rank for rank in ranks if slot in (None, plan.trainers[rank].slots[0])]
        found += [
            ("trainer", rank, [*python, "hpcrl.trainer.start.single_rank", *base, "--index", str(rank)])
            for rank in mine
        ]
    return found


def _lowest(plan: Plan, host: str) -> int:
    """The first slot that anything uses on a host; 0 where only the rollout process is."""
    engines = [part for index in range(len(plan.engines)) for part in plan.engine_nodes(index)]
    places = [p for p in (*plan.trainers, *engines) if p.host == host]
    return min((slot for place in places for slot in place.slots), default=0)


def devices(plan: Plan, role: str, index: int, host: str, slot: int | None, inherited: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a role, as `visible_devices`; nothing where there are no GPUs, or the role needs none.

    Args:
        inherited: the variable as this process has it. One of NO_GPUS, it says that there are none: the run is on CPUs.
            Trainer ranks of a host see all of its trainer's GPUs, as torchrun has it, unless each is bound to its own.
    """
    if (
        role == "rollout"
        or (role == "trainer" and not plan.trainers[index].slots)
        or inherited in NO_GPUS
        or (inherited is None and not gpus_are_here())
    ):
        return {}
    if role == "engine":
        together = [place := plan.engines[index]]
    elif role.startswith(PART):
        together = [place := plan.engines[int(role.split("-")[1])].also[index - 1]]
    else:
        place = plan.trainers[index]
        together = [plan.trainers[rank] for rank in plan.ranks_on(host)]
    slots = tuple(number for one in together for number in one.slots)
    own = None if slot is None else place.slots
    return {"CUDA_VISIBLE_DEVICES": visible_devices(inherited, slots, plan.slots_on(host), own)}


def start(role: str, index: int, command: list[str], rundir: RunDir, host: str, variables: Mapping[str, str]) -> Role:
    """Start one role in a separate session, its output going to its log, under a heading.

    Args:
        variables: in addition to those of every role.
    """
    log, memory = rundir.logs / f"{role}-{index}.log", MemoryWatch()
    with open_append(log) as out:
        out.write(heading(rundir.attempt, host))
        out.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**role_environment(), **variables},
        )
    return Role(role, index, process, log, memory)


def role_environment() -> dict[str, str]:
    """The user's environment, less what would change a role's behaviour by accident."""
    drop = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {
        PARENT: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": kept.get("HF_HUB_OFFLINE", "1"),
    }


# ---- from start to end


def run_host(
    options: Options,
    plan: Plan,
    rundir: RunDir,
    host: str,
    slot: int | None,
    told: SignalFlags,
    turn: Callable[[], None] = lambda: None,
) -> None:
    """Run what this host has to run; returns when the run is over, or was asked to end.

    turn is called about five times a second.

    Raises:
        PeerError: names the role that failed, here or elsewhere. Whatever happens, no process that was started here
            outlives the call.
    """
    roles: list[Role] = []
    sweep()  # after processes of an earlier attempt that were killed
    made = Scratch("host")
    beats = made.path / "beats"
    beats.mkdir(mode=0o700)
    pulse = HeartbeatMonitor(beats)
    timeline = role_timeline(rundir, "host", slot or 0, host)
    begun, since = timeline.now(), time.monotonic()

    def begin(name: str, index: int, command: list[str]) -> Role:
        gpus = devices(plan, name, index, host, slot, os.environ.get("CUDA_VISIBLE_DEVICES"))
        role = start(name, index, command, rundir, host, {**gpus, FOLDER: str(beats)})
        timeline.mark(f"starts {name}-{index}")
        return role

    try:
        ours = commands(options, plan, rundir, host, slot)
        roles += [begin(*one) for one in ours]
        engines = {index: command for name, index, command in ours if name == "engine"}
        restarter = EngineRestarter(rundir, host, restart_limit(options, plan), engines, begin)
        alive = lambda: check_alive(pulse, options.hang_timeout, rundir, host)  # noqa: E731
        _watch(roles, restarter, options, rundir, told, turn, alive)
    except PeerError:
        note_kernel_words(roles[0].log if roles else None, since)
        raise
    finally:
        with timeline.span("end the roles"):
            end([psutil.Process(r.process.pid) for r in roles if r.status is None], GRACE)
            end_descendants(0.5)
        timeline.add(ROLES, begun, timeline.now())
        timeline.close()
        made.remove()
        sweep()  # after supervisors of engines that were killed


def _watch(
    roles: list[Role],
    restarter: EngineRestarter,
    options: Options,
    rundir: RunDir,
    told: SignalFlags,
    turn: Callable[[], None],
    alive: Callable[[], None],
) -> None:
    working = [r for r in roles if not r.serves]
    close_by = quit_by = float("inf")
    looks = RunDirPoller(rundir)
    while any(r.status is None for r in working) or not looks.over(at_once=bool(working)):
        turn()
        if looks.end():
            return
        if not looks.stopping:  # which has its own limit, and needs the trainer alone
            alive()
        if not told.requests:
            restarter.restart_ended(roles)
        _check(roles, rundir, told, restarter.host)
        now = time.monotonic()
        if told.requests and quit_by == float("inf"):
            with contextlib.suppress(OSError):
                rundir.request_stop()  # time to save, if the sender of the signal leaves it
            quit_by = now + options.stop_timeout
        if told.requests > 1 or now > quit_by:
            raise PeerError(f"host {restarter.host} was told to end", "the last saved checkpoint is good")
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
    _check(roles, rundir, told, restarter.host)
    rundir.check()


def check_alive(pulse: HeartbeatMonitor, seconds: float, rundir: RunDir, host: str) -> None:
    """PeerError, recorded, if a process of this host hangs.

    Of the supervisor of an engine it is only said: its server serves on, and is missed by those who ask it.
    """
    for silent in pulse.silent(max(seconds, LEAST)):
        what = f"on {host}: {silent.name} {silent}; if it is only slow, raise --hang-timeout"
        if silent.name.startswith("engine-"):
            say(what)
            continue
        role, _, index = silent.name.rpartition("-")
        rundir.fail("trainer" if role == "torchrun" else role, int(index), what)
        raise PeerError(what)


@dataclass
class RunDirPoller:
    """Looks into the run directory, which all hosts share: about one call a second and host in a run where nothing
    happens.

    A whole machine room that asked five times a second would keep its file system from other work.
    """

    rundir: RunDir
    next: float = 0.0
    count: int = 0
    ended: bool = False
    is_over: bool = False
    stopping: bool = False  #: whether the run was asked to save and end

    def _look(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if now < self.next and not at_once:
            return
        self.next, self.count = now + EVERY, self.count + 1
        signs = self.rundir.signs()
        if ERROR in signs:
            self.rundir.check()
        self.is_over = OVER in signs
        self.stopping = STOP in signs
        self.ended = "end" in signs or (self.count % SELDOM == 0 and self.rundir.superseded())

    def end(self) -> bool:
        """Whether this host is to end now.

        Raises:
            PeerError: if the attempt has failed somewhere.
        """
        self._look()
        return self.ended

    def over(self, at_once: bool) -> bool:
        """Whether the trainer has summed up.

        Args:
            at_once: a host whose own roles have ended does not wait for the next look.
        """
        self._look(at_once)
        return self.is_over


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
        message = f"host {host} was told to end (cancelled, preempted, out of time, or another host of the job lost)"
    rundir.fail(gone[0].name, gone[0].index, message)
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
        beats = rundir.here / BEATS
        name = args.host if args.slot is None else f"{args.host}-{args.slot}"
        beats.mkdir(mode=0o700, exist_ok=True)
        with SignalFlags() as told, HeartbeatWriter(beats, name, every=HOST_BEAT):
            run_host(read_options(rundir), read_plan(rundir), rundir, args.host, args.slot, told)
    except HpcrlError as error:
        say(f"error: on {args.host}: {error}")
        rundir.fail("host", 0, f"on {args.host}: {error}")  # unless a role has said more already
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
