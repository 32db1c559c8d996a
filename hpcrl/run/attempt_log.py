"""STAGE/attempts.jsonl: how the attempts of a stage have begun to train, and failed; from it what faults have cost.

Invariants: the launcher alone appends to it, a line a fact, and of one that was killed the next launcher; a reader
takes every line that is whole; what cannot be written ends nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from hpcrl.run.rundir import AttemptFailure, RunDir
from hpcrl.utils.untrusted_files import open_append, read_regular

ATTEMPTS = "attempts.jsonl"  #: its name in a stage's directory
MOST = 500  #: characters of an error that are kept


class AttemptRecord(msgspec.Struct, frozen=True):
    """A line of the file.

    Attributes:
        time: unix time.
        step: the rollout that the attempt was at.
        launcher: when that began, which tells one from another.
    """

    attempt: int
    time: float
    step: int
    launcher: float


class ReadyRecord(AttemptRecord, frozen=True, tag="ready"):
    """An attempt is about to train, `step` first."""


class FailureRecord(AttemptRecord, frozen=True, tag="failed"):
    """An attempt has failed.

    Attributes:
        who: role and index.
        host: of that process, "" where that is not one host's.
    """

    who: str
    host: str
    why: str


class LeftOutRecord(AttemptRecord, frozen=True, tag="left out"):
    """No later attempt of the job uses this host.

    Attributes:
        spare: the host that has taken its place, "" if none has.
    """

    host: str
    spare: str
    why: str


class LoweredRecord(AttemptRecord, frozen=True, tag="lowered"):
    """The attempts after this one use less memory.

    Attributes:
        setting: its name.
        what: its new and its old value, and who had no memory left, in words.
    """

    setting: str
    what: str


Fact = ReadyRecord | FailureRecord | LeftOutRecord | LoweredRecord


class Fault(msgspec.Struct, frozen=True):
    """An attempt that has failed, and what that has cost.

    Attributes:
        time: unix time.
        step: the rollout that it was at.
        repeated: rollouts of this attempt that a later one made again, None before one trains.
        seconds: until the next attempt in the same job began to train, or failed before that; None before it does.
        left_out: the hosts that no later attempt of the job uses, and which took their places, in words.
    """

    attempt: int
    time: float
    step: int
    who: str
    host: str
    why: str
    repeated: int | None = None
    seconds: float | None = None
    left_out: str = ""

    @property
    def place(self) -> str:
        """Who failed, and where."""
        return f"{self.who} on {self.host}" if self.host else self.who


def note_ready(rundir: RunDir, step: int) -> None:
    """Append that this attempt is about to train."""
    _append(rundir, ReadyRecord(rundir.attempt, time.time(), step, _launcher()))


def note_failed(
    rundir: RunDir, step: int, failure: AttemptFailure | None, host: str, launcher: float | None = None
) -> None:
    """Append that this attempt has failed, at the rollout `step`.

    Args:
        launcher: of the attempt, where that is not this process.
    """
    who = f"{failure.role}-{failure.index}" if failure and failure.role not in ("launcher", "host") else "launcher"
    at = failure.time if failure else time.time()
    why = failure.message[:MOST] if failure else "?"
    began = _launcher() if launcher is None else launcher
    _append(rundir, FailureRecord(rundir.attempt, at, step, began, who, host, why))


def unended(rundir: RunDir) -> ReadyRecord | None:
    """The record of an attempt that was about to train, and of whose failure there is none."""
    mine = [event for event in read_attempts(rundir.root) if event.attempt == rundir.attempt]
    ended = any(isinstance(event, FailureRecord) for event in mine)
    return next((event for event in mine if isinstance(event, ReadyRecord) and not ended), None)


def note_left_out(rundir: RunDir, host: str, spare: str, why: str) -> None:
    """Append that no attempt after this one uses the host."""
    _append(rundir, LeftOutRecord(rundir.attempt, time.time(), 0, _launcher(), host, spare, why[:MOST]))


def note_lowered(rundir: RunDir, step: int, setting: str, what: str) -> None:
    """Append that the attempts after this one use less memory."""
    _append(rundir, LoweredRecord(rundir.attempt, time.time(), step, _launcher(), setting, what))


def _launcher() -> float:
    return psutil.Process().create_time()


def _append(rundir: RunDir, record: Fact) -> None:
    with contextlib.suppress(OSError), open_append(rundir.root / ATTEMPTS) as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_attempts(stage: Path) -> list[Fact]:
    """What is in the file of a stage's directory; [] where there is none."""
    try:
        data = read_regular(stage / ATTEMPTS)
    except OSError:
        return []
    found: list[Fact] = []
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=Fact))
    return found


def lowered_settings(stage: Path) -> list[LoweredRecord]:
    """What was lowered after out-of-memory errors, in order."""
    return [event for event in read_attempts(stage) if isinstance(event, LoweredRecord)]


def faults_of(events: Sequence[Fact]) -> list[Fault]:
    """The attempts that failed, in order, each with what it cost."""
    trained = {event.attempt for event in events if isinstance(event, ReadyRecord)}
    found = []
    for number, event in enumerate(events):
        if not isinstance(event, FailureRecord):
            continue
        rest = [e for e in events[number + 1 :] if isinstance(e, ReadyRecord | FailureRecord)]
        later = [e for e in rest if e.attempt > event.attempt]
        ready = next((e for e in later if isinstance(e, ReadyRecord)), None)
        again = 0 if ready is None or event.attempt not in trained else max(0, event.step - ready.step)
        repeated = None if ready is None else again
        here = bool(later) and later[0].launcher == event.launcher
        seconds = max(0.0, later[0].time - event.time) if here else None
        who = (event.who, event.host, event.why)
        found.append(Fault(event.attempt, event.time, event.step, *who, repeated, seconds, _left_out(events, event)))
    return found


def _left_out(events: Sequence[Fact], failure: FailureRecord) -> str:
    own = [e for e in events if isinstance(e, LeftOutRecord) and e.attempt == failure.attempt]
    return ", ".join(f"{e.host} ({e.spare} in its place)" if e.spare else e.host for e in own)
