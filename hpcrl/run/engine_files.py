"""What a run knows of its engines, as files of attempts/N.

    peers/engine-I.json, engine-I.K.json   engine I is up, in incarnation 0, K (`EnginePeer`, of its supervisor)
    peers/engine-I.K.ended.json            incarnation K is over, and why (`EngineEnd`)
    engines.json                           how each engine is (`EngineViews`, from the rollout process)

Invariants: a file of peers/ is written once and never changed, so one listing shows what is new; incarnations of an
engine are counted from 0 and only grow; whether an incarnation is followed by another is one rule, for all who have to
know. engines.json is written whole, at each change and every few seconds, so an old file means that its writer is
gone.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcrl.errors import EXITED
from hpcrl.plan import Plan
from hpcrl.run.attempt_log import lowered_settings
from hpcrl.run.exit_status import out_of_memory
from hpcrl.run.peers import Count, EnginePeer, HostName, Peer, peer_file, read_published
from hpcrl.run.rundir import RunDir, listed, read_record, write_atomic

if TYPE_CHECKING:  # it takes pydantic, which `hpcrl status` does without
    from hpcrl.config.options import Options

PAUSE = 1.0  #: seconds from an engine's end to its next start
_NAME = re.compile(r"engine-(\d+)(?:\.(\d+))?(\.ended)?\.json")


class EngineEnd(Peer, tag="engine_end"):
    """An incarnation of an engine is over.

    Attributes:
        why: for the user.
        again: whether it is started again.
        time: unix time.
    """

    host: HostName
    incarnation: Count
    why: str
    again: bool
    time: float


def restart_limit(options: Options, plan: Plan) -> int:
    """How often an engine of this run is started again.

    0 where it cannot be: engines that take turns with the trainer on the same GPUs, or are on several hosts, end the
    run as they end.
    """
    return 0 if options.takes_turns or any(engine.also for engine in plan.engines) else options.engine_restarts


def limit_after(why: str, limit: int, oom_retries: int, rundir: RunDir) -> int:
    """The limit after an end: 0 where the next attempt, with smaller settings, is the answer to it."""
    return 0 if out_of_memory(why) and len(lowered_settings(rundir.root)) < oom_retries else limit


def starts_again(limit: int, incarnation: int, was_up: bool, first: int = 0) -> bool:
    """Whether incarnation `incarnation` of an engine is followed by another.

    Args:
        limit: of `restart_limit`, which counts from 0 in every attempt.
        first: the one with which the engine has begun, or continued, in this attempt.
        was_up: whether it answered once in this incarnation. What fails before it ever came up is most likely wrong
            with its settings, and would be so again.
    """
    return incarnation - first < limit and (was_up or incarnation > first)


def tell_end(rundir: RunDir, index: int, end: EngineEnd) -> None:
    """Say that an incarnation is over, unless it was said before."""
    path = _ended_file(rundir, index, end.incarnation)
    if path.name not in listed(path.parent):
        write_atomic(path, msgspec.json.encode(msgspec.structs.replace(end, pid=os.getpid())))


def end_of(rundir: RunDir, index: int, incarnation: int) -> EngineEnd | None:
    """What was said of the end of this incarnation, or None."""
    path = _ended_file(rundir, index, incarnation)
    if path.name not in listed(path.parent):
        return None
    found = _read(rundir, path.name)
    return found if isinstance(found, EngineEnd) else None


def record_end(
    rundir: RunDir, index: int, host: str, incarnation: int, limit: int, was_up: bool, why: str, first: int = 0
) -> bool:
    """Say that an incarnation is over: to the run, which continues, or, where none follows, as the attempt's error,
    which the first incarnation's leads.

    Returns:
        Whether another incarnation follows.
    """
    again = starts_again(limit, incarnation, was_up, first)
    if again:
        tell_end(rundir, index, EngineEnd(host=host, incarnation=incarnation, why=why, again=again, time=time.time()))
    else:
        rundir.fail(
            "engine",
            index,
            final_error([end.why for n in range(first, incarnation) if (end := end_of(rundir, index, n))], why),
            "" if was_up else EXITED,
        )
    return again


def final_error(earlier: list[str], last: str) -> str:
    """The error of an engine that is not started again: its first end, and its last."""
    if not earlier:
        return last
    times = f"{len(earlier)} time{'s' if len(earlier) > 1 else ''}"
    return f"{earlier[0]}; it was started again {times} (--attempts), and at last: {last}"


def was_up(rundir: RunDir, index: int, incarnation: int) -> bool:
    """Whether the engine said in this incarnation that it answers."""
    return peer_file(rundir.here, EnginePeer, index, incarnation).name in listed(rundir.here / "peers")


class EngineReports:
    """What supervisors have said since the last look."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._seen = set[str]()

    def new(self) -> list[tuple[int, EnginePeer | EngineEnd]]:
        """(index of the engine, what was said), the earlier incarnation first.

        Raises:
            PeerError: names a file that holds something else.
        """
        found = []
        for name in listed(self._rundir.here / "peers") - self._seen:
            if (match := _NAME.fullmatch(name)) is None:
                continue
            said = _read(self._rundir, name)
            if said is not None:
                self._seen.add(name)
                found.append((said.incarnation, isinstance(said, EngineEnd), int(match[1]), said))
        return [(index, said) for _, _, index, said in sorted(found, key=lambda entry: entry[:3])]


def _ended_file(rundir: RunDir, index: int, incarnation: int) -> Path:
    return rundir.here / "peers" / f"engine-{index}.{incarnation}.ended.json"


def _read(rundir: RunDir, name: str) -> EnginePeer | EngineEnd | None:
    return read_published(rundir.here / "peers" / name, EnginePeer | EngineEnd)


# ---- engines.json: how each engine is

VIEW = "engines.json"  #: its name in attempts/N


class EngineView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    Attributes:
        state: as in `engine/membership/registry.py`.
        version: of its weights.
        requests: in flight.
        restarts: of its process, in this attempt.
        why: what is wrong with it, or was last.
    """

    index: int
    host: str
    state: str
    version: int | None
    requests: int
    restarts: int
    why: str = ""


class EngineViews(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All engines of an attempt.

    Attributes:
        time: unix time.
        published: the version that all are to hold.
    """

    time: float
    published: int | None
    engines: list[EngineView]


def write_views(rundir: RunDir, published: int | None, engines: list[EngineView]) -> None:
    """Write the file of this attempt."""
    data = msgspec.json.encode(EngineViews(time=time.time(), published=published, engines=engines))
    write_atomic(rundir.here / VIEW, data)


def read_views(here: Path) -> EngineViews | None:
    """What the attempt in `here` (attempts/N) says of its engines; None if it has not said anything.

    Raises:
        HpcrlError: if the file is damaged.
    """
    return read_record(here / VIEW, EngineViews)
