"""What a process did and when, as spans in a file of the process: the names that spans have, and the writer.

    STAGE/timeline/attempt-N/ROLE-I.jsonl   of a role, or of the process of a host
    RUN/timeline/launcher-K.jsonl           of the launcher, at its K-th start

The first line is a `Header`, every other one `[name, begin, end, {more}]`: integer microseconds of unix time by this
host's clock. A moment has no length; a name that begins with # is a counter, whose values are in `more`.

Invariants: the writer and the reader of a span take its name from here; a line goes out with one call, so that
a crash loses the line that was being written and no more; within a process time never goes back; a file has MOST
bytes and a line at most, which are weeks of work. Later lines, and lines that cannot be written, are left out: a
timeline never ends a run.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from hpcrl.plan import Plan
from hpcrl.run.rundir import RunDir

#: launcher: the recipe's prepare commands; one attempt of a stage, and that it begins
PREPARE = "prepare"
ATTEMPT = "attempt"
BEGINS = "attempt begins"
#: any role: from its first line until it can work; and what of that it spends on importing
START = "start up"
IMPORT = "import libraries"
#: further parts of it, of a trainer rank: waiting for the other ranks; the model; its weights; reference, critic and
#: the like; waiting for engines
MEET = "meet the other ranks"
BUILD = "build the model"
READ = "read the weights"
OTHERS = "prepare other models"
ENGINES = "wait for engines"
#: the process of a host: its roles, from the first start to the last end
ROLES = "roles"
#: trainer.  READY and SAVED are moments, with rollout_id: where the run resumes, and up to where it is on disk
READY = "ready"
SAVED = "saved"
STEP = "step"
WAIT = "wait for data"
TRAIN = "train"
LOGPROBS = "forward log-probs"
UPDATE = "update weights"
PAUSED = "engines pause"
SAVE = "save"
EVALUATE = "evaluate"
#: rollout process: the making of a rollout; an engine that has requests, with its number as `engine`; requests in
#: flight, and sandboxes by state (counters)
MAKE = "make rollout"
GENERATE = "generate"
REQUESTS = "#requests in flight"
SANDBOXES_NOW = "#sandboxes"

Cost = Literal["training", "generating", "waiting", "updating", "saving", "starting", "lost"]
COSTS: tuple[Cost, ...] = ("training", "generating", "updating", "saving", "waiting", "starting", "lost")
#: where a slot has several owners at work, the first of these counts
PRECEDENCE: tuple[Cost, ...] = ("training", "updating", "saving", "generating", "starting")
#: role -> name -> what the slots that the process owns do meanwhile; anything else is waiting
DOES: dict[str, dict[str, Cost]] = {
    "trainer": {TRAIN: "training", UPDATE: "updating", SAVE: "saving"},
    "engine": {GENERATE: "generating", PAUSED: "updating", START: "starting"},
    "rollout": {MAKE: "generating", EVALUATE: "generating"},
}
ROLES_IN_ORDER = ("launcher", "host", "trainer", "rollout", "engine", "sandbox")


def order(track: str) -> tuple[int, str, int]:
    """The place of a track among others: by role, then number."""
    role = re.split(r"[- ]", track)[0]
    number = re.search(r"-(\d+)$", track)
    place = ROLES_IN_ORDER.index(role) if role in ROLES_IN_ORDER else len(ROLES_IN_ORDER)
    return place, track if number is None else role, int(number[1]) if number else 0


FOLDER = "timeline"  #: in a stage's directory, and in the run's for its launcher
MOST = 1 << 29  #: bytes of a file: some 7 million spans
MANY = 64  #: trainer ranks
SECOND = 1_000_000  #: microseconds
#: what says that a process is still there; microseconds between two
ALIVE = "alive"
EVERY = 60 * SECOND


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes.

    Attributes:
        opened: when, in microseconds.
    """

    role: str
    index: int
    host: str
    pid: int
    opened: int


class Timeline:
    """One process's.

    Attributes:
        path: None to record nothing.
    """

    def __init__(self, path: Path | None, role: str = "", index: int = 0, host: str = "", most: int = MOST) -> None:
        self._most = most
        self._offset = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self._file: int | None = None
        self._alive = 0
        self._counted: dict[str, tuple[int, dict[str, float]]] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._file).st_size
        except OSError:
            self.close()
            return
        header = Header(role=role, index=index, host=host, pid=os.getpid(), opened=self.now())
        self._write((b"\n" if self._size else b"") + msgspec.json.encode(header))  # after a line that a crash has torn

    def now(self) -> int:
        """Microseconds of unix time that never go back."""
        return time.monotonic_ns() // 1000 + self._offset

    @contextlib.contextmanager
    def span(self, name: str, **more: Any) -> Iterator[None]:
        """What is done in the context, however it ends."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(name, begin, self.now(), **more)

    def mark(self, name: str, **more: Any) -> None:
        """A moment."""
        now = self.now()
        self.add(name, now, now, **more)

    def imported(self) -> None:
        """This process has imported what it needs: what that took from its very beginning."""
        self.add(IMPORT, process_began(), self.now())

    def started(self) -> None:
        """This process can work now: what it took from its very beginning, imports included."""
        self.add(START, process_began(), self.now())

    def count(self, name: str, **values: float) -> None:
        """A counter's values from now on; cheap to call often: at most one a second is recorded, and only if something
        has changed."""
        now, (at, known) = self.now(), self._counted.get(name, (0, {}))
        if values != known and now - at >= SECOND:
            self._counted[name] = (now, values)
            self.add(name, now, now, **values)

    def alive(self) -> None:
        """A sign of life; cheap to call often."""
        if self.now() - self._alive >= EVERY:
            self.mark(ALIVE)

    def add(self, name: str, begin: int, end: int, **more: Any) -> None:
        """A span whose ends are known, from `now`."""
        if self._file is not None and self._size < self._most:
            self._alive = end
            self._write(msgspec.json.encode([name, begin, end, more] if more else [name, begin, end]))

    def close(self) -> None:
        """Nothing is recorded from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._size += os.write(self._file, line + b"\n")
        except OSError:
            self.close()


NOWHERE = Timeline(None)  #: records nothing


def process_began() -> int:
    """When this process was made, in microseconds of unix time; to a second, as the kernel says when it was booted."""
    return int(psutil.Process().create_time() * 1e6)


def merged_of(folder: Path) -> Path:
    """The file of all timelines of an attempt that is long over, in place of their directory."""
    return folder.with_name(f"{folder.name}.jsonl")


def role_timeline(rundir: RunDir, role: str, index: int, host: str) -> Timeline:
    """The timeline of a role in an attempt."""
    name = f"{role}-{index}" if role != "host" else f"host-{host.replace('/', '_')}-{index}"
    return Timeline(rundir.root / FOLDER / f"attempt-{rundir.attempt}" / f"{name}.jsonl", role, index, host)


def trainer_timeline(rundir: RunDir, plan: Plan, rank: int) -> Timeline:
    """The timeline of a trainer rank; in a run of more than MANY, only the first of each host has one."""
    host = plan.trainers[rank].host
    if len(plan.trainers) > MANY and plan.ranks_on(host)[0] != rank:
        return NOWHERE
    return role_timeline(rundir, "trainer", rank, host)


def launcher_timeline(root: Path) -> Timeline:
    """The timeline of a launcher that starts now, on this host."""
    number = len(list((root / FOLDER).glob("launcher-*.jsonl")))
    while (path := root / FOLDER / f"launcher-{number}.jsonl").exists():
        number += 1
    return Timeline(path, "launcher", number, socket.gethostname())
