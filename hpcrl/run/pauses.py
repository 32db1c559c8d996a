"""Between two attempts on the same hosts: what of the first lives on, and what the second takes over.

    attempts/N/paused/HOST.json     what lives on there, now that the rest of N has failed and ended (`PausedHost`)
    attempts/N/again                N + 1 begins on the hosts that are paused
    attempts/N+1/carried.json       the engines that N + 1 takes over (`CarriedOver`)

Invariants: an engine is carried over only if it answered in attempt N, and every part of it lives; its record in
peers/ is that of attempt N, with the same address, key and incarnation, so that all who look for engines find it as
they find one that has just started.  The mark `again` comes last: who sees it finds all the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.plan import Plan
from hpcrl.run.peers import Count, EnginePeer, PublishedRecords, peer_file, read_published
from hpcrl.run.rundir import RunDir, listed, write_atomic
from hpcrl.utils.untrusted_files import touch

AGAIN = "again"  #: name of a mark in attempts/N
PAUSED = "paused"  #: directory in attempts/N
#: more incarnations than an attempt gives an engine: of one on a host that says nothing any more they are not known
UNKNOWN = 1 << 16
CARRIED = "carried.json"  #: a file in attempts/N


class PausedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host on which an attempt has ended, except its engines.

    Attributes:
        engines: the engines that are well, and their incarnations.
        parts: [engine, node] of parts of engines over several hosts that live.
        last: the newest incarnation of every engine that was started there.
        stuck: what cannot be killed there, "" if all else has ended.
    """

    engines: dict[Count, Count] = {}
    parts: list[tuple[Count, Count]] = []
    last: dict[Count, Count] = {}
    stuck: str = ""


class CarriedOver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attempt takes over from the one before it.

    Attributes:
        engines: those that continue, and their incarnations.
        begin: the incarnation with which each of the others is started.
    """

    engines: dict[Count, Count] = {}
    begin: dict[Count, Count] = {}


def carried_over(old: Plan, new: Plan, paused: Iterable[PausedHost]) -> CarriedOver:
    """What the next attempt takes over of the one before: engines whose places are the same in both plans.

    An engine that is started again gets a new incarnation, and so a key that no earlier process had; where none
    continues, all keys are new, and incarnations are counted from 0.
    """
    hosts = list(paused)
    well = {index: number for host in hosts for index, number in host.engines.items()}
    parts = {part for host in hosts for part in host.parts}
    last = {index: number for host in hosts for index, number in host.last.items()}
    whole = {
        index: number
        for index, number in well.items()
        if old.engines[index : index + 1] == new.engines[index : index + 1] != ()
        and all((index, node) in parts for node in range(1, 1 + len(new.engines[index].also)))
    }
    others = [index for index in range(len(new.engines)) if index not in whole]
    return CarriedOver(engines=whole, begin={i: last.get(i, UNKNOWN * new.attempt) + 1 for i in others if whole})


# ---- the host's side


def tell_paused(rundir: RunDir, name: str, host: PausedHost) -> None:
    """Say that the attempt has ended on this host.

    Args:
        name: the host's sign of life (`RunDir.here`/beats).

    Raises:
        HpcrlError: if that cannot be written.
    """
    with contextlib.suppress(FileExistsError):
        (rundir.here / PAUSED).mkdir(mode=0o700)
    write_atomic(rundir.here / PAUSED / f"{name}.json", msgspec.json.encode(host))


def read_carried(rundir: RunDir) -> CarriedOver:
    """What this attempt has taken over; nothing, if it is the first on its hosts.

    Raises:
        PeerError: names a file that holds something else.
    """
    if CARRIED not in listed(rundir.here):
        return CarriedOver()
    return read_published(rundir.here / CARRIED, CarriedOver) or CarriedOver()


# ---- the launcher's side


def paused_hosts(rundir: RunDir) -> PublishedRecords[PausedHost]:
    """Those that have said so, by their names."""
    return PublishedRecords(rundir.here / PAUSED, PausedHost)


def hand_over(old: RunDir, new: RunDir, carried: CarriedOver) -> None:
    """Have the hosts that are paused in `old` begin `new`, whose plan and keys are there.

    Raises:
        HpcrlError: if that cannot be written.
    """
    for index, incarnation in carried.engines.items():
        here, there = (peer_file(rundir.here, EnginePeer, index, incarnation) for rundir in (old, new))
        if (found := read_published(here, EnginePeer)) is not None:
            write_atomic(there, msgspec.json.encode(found))
    write_atomic(new.here / CARRIED, msgspec.json.encode(carried))
    touch(old.here / AGAIN)


def follow_log(log: Path, folder: Path) -> Path:
    """The log of a process that continues, also in the next attempt's directory of logs: one file under two names, of
    which the older goes when the older attempt is tidied up."""
    other = folder / log.name
    with contextlib.suppress(OSError):
        other.hardlink_to(log)
        return other
    with contextlib.suppress(OSError):
        log.replace(other)
        return other
    return log
