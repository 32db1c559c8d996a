"""What this process has done with sandboxes, whichever of its pools they came from, and what one call has done in them.

    `CountedPool`   counts what it does
    `failed`        something that was asked of a box has failed, and by which cause
    `news`          what has changed since it was last asked for
    `recording`     every command that this task runs in a box, for a transcript

Invariants: what `news` says once it never says again, so that sums of it count nothing twice; a process that has made
no pool has none.  What is recorded is bounded, whatever runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from hpcrl.sandbox.limits import BoxLimits

#: a box that has ended, or could not be made; a limit that a command has reached
CAUSES = ("lost", "unconfined", "memory", "processes", "time", "cpu", "disk", "output")
STATES = ("used", "warm", "making")
#: words of the limit of a `BoxResult` -> its cause
_LIMITS = {"of memory": "memory", " processes": "processes", "of processor time": "cpu", "its disk": "disk"}


class PoolCounts(NamedTuple):
    """What a pool has done, and has.

    Attributes:
        used, warm, making: boxes in use, made ahead, and being made.
        made: boxes that have been ready.
        lost: boxes that ended while they were in use, and were not to.
        handed_out: how often a box was.
        waited: seconds that callers waited for one, in all.
        seconds: that boxes were in use, in all.
    """

    used: int = 0
    warm: int = 0
    making: int = 0
    made: int = 0
    lost: int = 0
    handed_out: int = 0
    waited: float = 0.0
    seconds: float = 0.0


class CountedPool:
    """A pool of sandboxes, here or on other nodes, and what it has done.

    Attributes:
        closed: it hands out no box any more.
    """

    def __init__(self, limits: BoxLimits | None = None) -> None:
        self._limits = limits or BoxLimits()
        self._counts = PoolCounts()
        self._uses: dict[object, float] = {}  # boxes in use, and since when
        self.closed = False
        _known[self] = {}

    def counts(self) -> PoolCounts:
        """What there is now, and was done so far."""
        now = time.monotonic()
        running = sum(now - begun for begun in self._uses.values())
        return self._counts._replace(seconds=self._counts.seconds + running)

    def _count(self, **more: float) -> None:
        self._counts = self._counts._replace(**{name: getattr(self._counts, name) + by for name, by in more.items()})

    @contextlib.contextmanager
    def _in_use(self, begun: float) -> Iterator[None]:
        """A box that was waited for since `begun` is in use in the context."""
        use, now = object(), time.monotonic()
        self._uses[use] = now
        self._count(used=1, handed_out=1, waited=now - begun)
        try:
            yield
        finally:
            self._count(used=-1, seconds=time.monotonic() - self._uses.pop(use))

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SandboxNews(NamedTuple):
    """What has changed.

    Attributes:
        states: boxes in each of STATES now.
        more: how much the other fields of `PoolCounts`, and failures by cause, have grown.
    """

    states: dict[str, int]
    more: dict[str, float]


_known: weakref.WeakKeyDictionary[Any, dict[str, float]] = weakref.WeakKeyDictionary()
_more: Counter[str] = Counter()
_states: dict[str, int] = dict.fromkeys(STATES, 0)


def failed(cause: str) -> None:
    """Count a failure.

    Args:
        cause: one of CAUSES; a lost box is its pool's to count.
    """
    _more[cause] += 1


def settle(pool: CountedPool) -> None:
    """Count what a pool has done until now, which may be gone when `news` is asked for the next time."""
    if (before := _known.get(pool)) is None:
        return
    counts = pool.counts()._asdict()
    for name in counts.keys() - set(STATES):
        _more[name] += counts[name] - before.get(name, 0)
    before |= counts


def news() -> SandboxNews | None:
    """What has changed since the last time, in all pools of this process together; None if nothing has."""
    global _states
    states = dict.fromkeys(STATES, 0)
    for pool in list(_known):
        settle(pool)
        for state in STATES:
            states[state] += getattr(pool.counts(), state)
    more = dict(_more)
    _more.clear()
    if states == _states and not any(more.values()):
        return None
    _states = states
    return SandboxNews(states, {name: value for name, value in more.items() if value})


def causes_of(timed_out: bool, cut: bool, limit: str) -> list[str]:
    """Which limits a command has reached.

    Args:
        cut: some of its output was thrown away.
        limit: of its `BoxResult`.
    """
    found = [cause for words, cause in _LIMITS.items() if words in limit][:1]
    return found + ["time"] * timed_out + ["output"] * cut


# ---- what a call does

LONGEST = 1000  #: characters of a command that are kept
COMMANDS = 200  #: of a call that are kept: the first half, and the last


class Command(NamedTuple):
    """A command that a call has run in a box.

    Attributes:
        box: which of the boxes of the call, from 1.
        at: seconds since the call began.
        command: a line of the shell, or words in one.
        code: None where the box was lost, or the command is left to run.
        limits: as `causes_of`.
    """

    box: int
    at: float
    command: str
    code: int | None
    seconds: float
    limits: Sequence[str]


class Recording:
    """What a call has done in boxes, in order of its ends.

    Attributes:
        left_out: commands in the middle that are not kept.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._begun = time.monotonic()
        self._boxes: dict[int, int] = {}
        self._commands: list[Command] = []

    def add(self, box: object, command: str | Sequence[str], code: int | None, began: float, limits: list[str]) -> None:
        """A command has ended.

        Args:
            began: by time.monotonic().
        """
        number = self._boxes.setdefault(id(box), len(self._boxes) + 1)
        text = command if isinstance(command, str) else " ".join(command)
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
        ended = time.monotonic()
        self._commands.append(Command(number, began - self._begun, text, code, ended - began, limits))
        if len(self._commands) > COMMANDS:
            del self._commands[COMMANDS // 2]
            self.left_out += 1

    def commands(self) -> list[Command]:
        """Those that are kept."""
        return list(self._commands)


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record what this task, and those that it starts, run in boxes."""
    found = Recording()
    token = _recording.set(found)
    try:
        yield found
    finally:
        _recording.reset(token)


def ran(box: object, command: str | Sequence[str], code: int | None, began: float, limits: Sequence[str] = ()) -> None:
    """A command has ended in a box, or the box under it (code None): count which limits it has reached.

    Args:
        began: by time.monotonic().
    """
    for cause in limits:
        failed(cause)
    if (record := _recording.get()) is not None:
        record.add(box, command, code, began, list(limits))
