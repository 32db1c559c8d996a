"""What is done to a run, to whom, and what must come of it.

Invariant: a kind says beforehand whether the run survives it, within how many seconds everything is over if not, and
what the words must name; so a run that dies of what it should survive is as wrong as one that lives on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from tests.support.faults.beds import Bed, Missed, Process
from tests.support.faults.local import LocalBed
from tests.support.out_of_memory import ORDER
from tests.support.runs import REPO

HANG = 15.0  #: --hang-timeout of the runs
MINUTE = 60.0  #: seconds that a disk is full which somebody then makes room on
ENDS, LONG = (
    60.0,
    100.0,
)  #: seconds until everything of a struck run is over: usually; where somebody has to fall silent first

#: whom -> a word of the command line, and what the run's words must match once he was killed
WHO: dict[str, tuple[str, str]] = {
    "a trainer rank": ("hpcrl.trainer.main", r"trainer-\d|rank \d"),
    "torchrun": ("hpcrl.trainer.start.torchrun", r"trainer-\d|rank \d"),
    "the rollout process": ("hpcrl.rollout.main", r"rollout-0"),
    "the host's process": ("hpcrl.launch.host", r"process of this host|host node\d|srun on|host \S+ \(MPI"),
}
#: of these, whose end no engine notices
ROLES = ("a trainer rank", "torchrun", "the rollout process")


@dataclass
class Struck:
    """A fault that has happened.  heal: brings the machine, not the run, back to what it was; host: which the error
    must name."""

    victim: str
    heal: Callable[[], object] = lambda: None
    host: str = ""


@dataclass(frozen=True)
class Kind:
    """strike: does it, once the moment has come.  ends: whether the run's attempt ends of it.  weight: how often it is
    drawn.

    says: what the words of the end must match.  seconds: until the end.  early: whether it may come while the run
    starts.  orderly: whether nobody has to be killed, so that nothing may be left on disks, where else it goes at the
    next start.  engines_live: whether engines must live through it, where the job continues.
    """

    name: str
    strike: Callable[[Bed, random.Random], Struck]
    ends: bool = True
    weight: float = 1.0
    says: str = ""
    seconds: float = ENDS
    early: bool = True
    orderly: bool = False
    engines_live: bool = False


def victim(bed: Bed, chance: random.Random, word: str, forked: bool = False) -> Process:
    """One of the processes that have the word in their command line.

    forked: one that such a process has forked, as srun has a child and a rank one that writes its checkpoint; else none
    of these, for nothing, or little, depends on them.
    """
    found = bed.find(word)
    pids = {process.pid for process in found}
    if not (chosen := [process for process in found if (_parent(process) in pids) == forked]):
        raise Missed(word)
    return chance.choice(chosen)


def _parent(process: Process) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).ppid()
    return -1


def send(number: signal.Signals, process: Process) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise Missed(" ".join(process.argv)) from None


def name_of(process: Process) -> str:
    words = [word for word in process.argv if word.startswith("hpcrl.")] or process.argv[:1]
    index = process.argv[process.argv.index("--index") + 1] if "--index" in process.argv else ""
    return f"{words[0]} {index}".strip() + f" on {process.host}"


def kill(word: str, forked: bool = False) -> Callable[[Bed, random.Random], Struck]:
    def strike(bed: Bed, chance: random.Random) -> Struck:
        process = victim(bed, chance, word, forked)
        send(signal.SIGKILL, process)
        named = process.host if word == "hpcrl.launch.host" and process.host not in ("", "here") else ""
        return Struck(name_of(process), host=named)

    return strike


def kill_two(bed: Bed, chance: random.Random) -> Struck:
    """Two at once, or the second while the first is being noticed."""
    first = victim(bed, chance, chance.choice(sorted(WHO.values()))[0])
    second = victim(bed, chance, chance.choice(sorted(WHO.values()))[0])
    send(signal.SIGKILL, first)
    time.sleep(chance.choice((0.0, chance.uniform(0, 2))))
    with contextlib.suppress(Missed):
        send(signal.SIGKILL, second)
    return Struck(f"{name_of(first)} and {name_of(second)}")


def sleep(word: str, seconds: float | None) -> Callable[[Bed, random.Random], Struck]:
    """SIGSTOP, and after some seconds SIGCONT; None: for ever."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        process = victim(bed, chance, word)
        send(signal.SIGSTOP, process)
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        return Struck(name_of(process))

    return strike


def out_of_memory(bed: Bed, chance: random.Random) -> Struck:
    """The last rank has no memory, once a run: with full recomputation it has enough, and the same numbers."""
    order = bed.root / ORDER
    if order.exists():
        raise Missed("it recomputes")
    order.touch()
    return Struck("the last rank")


# ---- of runs of this machine


def told(*numbers: signal.Signals) -> Callable[[Bed, random.Random], Struck]:
    """Signals to `hpcrl run`, as Ctrl-C or a shell sends them."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        assert isinstance(bed, LocalBed) and bed.process is not None
        for count, number in enumerate(numbers):
            time.sleep(count * chance.uniform(0, 1.5))
            if bed.process.poll() is not None:
                break
            bed.process.send_signal(number)
        return Struck("hpcrl run")

    return strike


def kill_launcher(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, LocalBed) and bed.process is not None
    bed.process.kill()
    return Struck("hpcrl run")


def stop_command(bed: Bed, chance: random.Random) -> Struck:
    """`hpcrl stop`."""
    command = [sys.executable, "-m", "hpcrl", "stop", str(bed.root)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(REPO)}
    )
    if done.returncode:
        raise Missed(done.stderr)
    return Struck("hpcrl run")


def full_disk(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, LocalBed)
    if not bed.disk.mounted:
        raise Missed("no file system of its own")
    filler = bed.disk.fill()
    return Struck(str(filler), heal=filler.unlink)


def full_for_a_minute(bed: Bed, chance: random.Random) -> Struck:
    """The disk is full, and somebody makes room."""
    struck = full_disk(bed, chance)
    try:
        time.sleep(MINUTE)
    finally:
        struck.heal()
    return Struck(struck.victim)


def read_only_disk(bed: Bed, chance: random.Random) -> Struck:
    assert isinstance(bed, LocalBed)
    if not bed.disk.breaks:
        raise Missed("no disk that can break")
    bed.disk.break_down()
    return Struck(str(bed.disk.at), heal=bed.disk.heal)


def all_asleep(bed: Bed, chance: random.Random) -> Struck:
    """Everything of the run stands still, as on a host that is suspended or starved."""
    found = bed.processes()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        time.sleep(chance.uniform(0.5, 3) if number == signal.SIGSTOP else 0)
    return Struck(f"{len(found)} processes")


def state_removed(bed: Bed, chance: random.Random) -> Struck:
    """The launcher's word is gone; it says it again."""
    (bed.root / "state.json").unlink(missing_ok=True)
    return Struck("state.json")


def role_kills() -> list[Kind]:
    """SIGKILL of each process of a run."""
    return [
        Kind(
            f"SIGKILL of {who}",
            kill(word),
            says=says,
            weight=2 if who == "a trainer rank" else 1,
            engines_live=who in ROLES,
        )
        for who, (word, says) in WHO.items()
    ]


def local_kinds() -> list[Kind]:
    """Faults of runs on this machine."""
    kinds = role_kills()
    kinds += [Kind(f"SIGSTOP of {who} for 3 s", sleep(word, 3.0), ends=False) for who, (word, _) in WHO.items()]
    kinds += [
        Kind(
            f"SIGSTOP of {who} for ever", sleep(word, None), says="sign of life", seconds=LONG, weight=0.12, early=False
        )
        for who, (word, _) in WHO.items()
    ]
    return [
        *kinds,
        Kind("SIGKILL of two", kill_two),
        Kind("SIGKILL of the launcher", kill_launcher, weight=2),
        Kind("SIGSTOP of all for up to 3 s", all_asleep, ends=False, weight=2),
        Kind("state.json removed", state_removed, ends=False, weight=0.5),
        Kind("SIGTERM", told(signal.SIGTERM), says="stopped", weight=1.5, orderly=True),
        Kind("SIGINT, twice", told(signal.SIGINT, signal.SIGINT), says="stopped|ended without saving"),
        Kind("hpcrl stop", stop_command, says="stopped", weight=0.5, orderly=True),
        Kind("SIGUSR1", told(signal.SIGUSR1), says="stopped", weight=0.5),
        Kind("full disk", full_disk, says=r"no space left|full", weight=1.5),
        Kind("full disk for a minute", full_for_a_minute, says=r"no space left|full", weight=0.5, early=False),
        Kind("read-only disk", read_only_disk, says="read-only", weight=1.5),
    ]


# ---- with engines


def server(bed: Bed, chance: random.Random) -> psutil.Process:
    """The vLLM server of the engine, once it has an engine core."""
    process = psutil.Process(victim(bed, chance, "hpcrl.engine.server").pid)
    if not process.children():
        raise Missed("the engine has no core yet")
    return process


def strike_engine(number: signal.Signals, core: bool) -> Callable[[Bed, random.Random], Struck]:
    """A signal to the server, or to its engine core."""

    def strike(bed: Bed, chance: random.Random) -> Struck:
        try:
            process = server(bed, chance)
            found = process.children()[-1] if core else process
            found.send_signal(number)
        except (psutil.Error, IndexError) as error:
            raise Missed(str(error)) from None
        return Struck(f"the engine's {'core' if core else 'server'}")

    return strike


def of_engines(ends: bool) -> list[Kind]:
    """Faults of a vLLM server and of its engine core.  ends: whether the attempt ends of it."""
    return [
        Kind(
            f"{name} of the engine's {'core' if core else 'server'}",
            strike_engine(number, core),
            ends=ends,
            says="engine",
            seconds=LONG,
            early=False,
        )
        for name, number in (("SIGKILL", signal.SIGKILL), ("SIGSTOP for ever", signal.SIGSTOP))
        for core in (False, True)
    ]


def engine_kinds() -> list[Kind]:
    """Faults of a run with an engine, which is started again whatever becomes of it."""
    kinds = of_engines(ends=False)
    kinds.append(Kind("SIGKILL of the engine's supervisor", kill("hpcrl.engine.main"), ends=False, early=False))
    return [*kinds, *(kind for kind in local_kinds() if "torchrun" not in kind.name and "ever" not in kind.name)]
