"""The plan of a weight update: pieces, each with the rank that sends it, the host that receives it, and its round.

    plan = redistribute(layouts, workers, ranks=64, limit=256 * 2**20)
    plan.sent(), plan.received()             # bytes of each rank, of each destination host

A *destination* is a host with workers of engines.  What several workers of a host need is sent there once and shared
among them.  Several engines that need the same get it each from the trainer, from whichever copies are least busy.

Invariants: every element that a destination's workers need reaches it exactly once; the busiest rank sends no more than
the least possible, apart from rounding to rows of a tensor; a round holds at most `limit` bytes for every sender and
every destination, where what a destination reads in place counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcrl.weights.redistribution.layouts import Layouts, Worker, wanted
from hpcrl.weights.redistribution.loads import ALIGN, divide, padded, shares

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class DestinationHost:
    """A host with workers, by their numbers."""

    host: str
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Redistribution:
    """The pieces as columns of int64, in the order of rounds, and within one of (sender, destination).

    Attributes:
        hosts: of each rank.
        in_place: bytes of a destination's own host are read in place.
        through_ranks: bytes for other hosts go to a rank there (`carriers`), in whose memory they are read.
        tensor: the tensor's number in `layouts`.
        top, bottom, left, right: the piece is [top, bottom) x [left, right) of the tensor.
        sender: a rank.
    """

    layouts: Layouts
    destinations: tuple[DestinationHost, ...]
    hosts: tuple[str, ...]
    limit: int
    in_place: bool
    through_ranks: bool
    tensor: np.ndarray
    top: np.ndarray
    bottom: np.ndarray
    left: np.ndarray
    right: np.ndarray
    nbytes: np.ndarray
    sender: np.ndarray
    destination: np.ndarray
    round: np.ndarray

    @property
    def rounds(self) -> int:
        """How many there are."""
        return int(self.round[-1]) + 1 if len(self.round) else 0

    def sent(self) -> np.ndarray:
        """Bytes that each rank sends."""
        return np.bincount(self.sender, self.nbytes, minlength=self.ranks).astype(np.int64)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def crossing(self) -> np.ndarray:
        """Bytes that each rank sends to other hosts."""
        return np.bincount(self.sender, self.nbytes * self.far(), minlength=self.ranks).astype(np.int64)

    def arriving(self) -> np.ndarray:
        """Bytes that reach each destination from ranks of other hosts."""
        return np.bincount(self.destination, self.nbytes * self.far(), minlength=len(self.destinations)).astype(
            np.int64
        )

    def landing(self) -> np.ndarray:
        """Bytes that each rank takes in for the destination on its host."""
        return np.bincount(self.carrier(), self.nbytes * self.far(), minlength=self.ranks).astype(np.int64)

    def carrier(self) -> np.ndarray:
        """The rank in whose memory the destination reads each piece, where it is read in memory of ranks."""
        return carriers(self.hosts, self.destinations)[self.sender, self.destination]

    def far(self) -> np.ndarray:
        """Whether each piece goes to another host."""
        places = {
            host: number
            for number, host in enumerate(dict.fromkeys((*self.hosts, *(x.host for x in self.destinations))))
        }
        rank, destination = (
            np.asarray([places[host] for host in found]) for found in (self.hosts, [x.host for x in self.destinations])
        )
        return rank[self.sender] != destination[self.destination]

    def received(self) -> np.ndarray:
        """Bytes that reach each destination."""
        return np.bincount(self.destination, self.nbytes, minlength=len(self.destinations)).astype(np.int64)

    def largest(self) -> tuple[int, int]:
        """(most bytes that a rank packs for one round, most that a destination takes in one), with the gaps between
        pieces."""
        packed = padded(self.nbytes)
        if self.through_ranks:
            who = np.concatenate([self.sender, self.carrier()])
            sizes = np.concatenate([packed, packed * self.far()])
            totals = np.bincount(np.tile(self.round, 2) * self.ranks + who, sizes)
            return int(totals.max(initial=0)), 0
        found = []
        taken = packed * self.far() if self.in_place else packed
        for sizes, who, count in ((packed, self.sender, self.ranks), (taken, self.destination, len(self.destinations))):
            found.append(int(np.bincount(self.round * count + who, sizes).max()) if len(sizes) else 0)
        return found[0], found[1]


def find_destinations(workers: Sequence[Worker]) -> tuple[DestinationHost, ...]:
    """The hosts of the workers, in order of first use."""
    hosts: dict[str, list[int]] = {}
    for number, worker in enumerate(workers):
        hosts.setdefault(worker.host, []).append(number)
    return tuple(DestinationHost(host, tuple(mine)) for host, mine in hosts.items())


def carriers(hosts: Sequence[str], destinations: Sequence[DestinationHost]) -> np.ndarray:
    """int64 [ranks, destinations]: the rank in whose memory a destination reads what a rank sends: the rank itself on
    its own host, elsewhere the one that has the same place there, so that a host's links share what arrives.

    Raises:
        ValueError: if there is no rank on a destination's host.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    found = np.empty((len(hosts), len(destinations)), dtype=np.int64)
    for rank, host in enumerate(hosts):
        place = members[host].index(rank)
        for number, destination in enumerate(destinations):
            there = members.get(destination.host)
            if there is None:
                raise ValueError(f"no rank is on {destination.host}")
            found[rank, number] = rank if host == destination.host else there[place % len(there)]
    return found


def redistribute(
    layouts: Layouts,
    workers: Sequence[Worker],
    hosts: Sequence[str],
    limit: int,
    in_place: bool = False,
    through_ranks: bool = False,
) -> Redistribution:
    """The plan, the same wherever it is made.

    Args:
        hosts: of each rank.
        limit: bytes that a rank packs, and a destination takes, in one round. Copies on a destination's own host are
            preferred.
        in_place: a destination reads bytes of ranks of its own host in place, so they take none of its memory and do
            not count there.
        through_ranks: what comes from other hosts reaches a destination through a rank of its own, which takes in at
            most `limit` bytes in one round.

    Raises:
        ValueError: if no rank holds a part that is needed, `limit` is below 64 bytes, or a host has no rank to go
            through.
    """
    if limit < ALIGN:
        raise ValueError(f"a round of {limit} bytes holds no piece")
    destinations = find_destinations(workers)
    return _ordered(layouts, destinations, tuple(hosts), limit, in_place, through_ranks)


def busiest(plan: Redistribution) -> float:
    """Bytes through the busiest link; a rank has one and each worker has one, with two directions; within a host they
    are free."""
    if plan.through_ranks:
        return float(max(plan.crossing().max(initial=0), plan.landing().max(initial=0)))
    there = plan.arriving() / np.asarray([len(destination.workers) for destination in plan.destinations])
    return float(max(plan.crossing().max(initial=0), there.max(initial=0)))


def _ordered(
    layouts: Layouts,
    destinations: Sequence[DestinationHost],
    hosts: tuple[str, ...],
    limit: int,
    in_place: bool,
    through_ranks: bool,
) -> Redistribution:
    """Pieces with senders and rounds."""
    sets, pieces = _pieces(layouts, destinations, hosts)
    pieces = _cut_to(pieces, limit // ALIGN * ALIGN)
    pieces = _sent_by(pieces, sets, len(hosts), limit)
    order = np.lexsort((pieces["left"], pieces["top"], pieces["destination"], pieces["tensor"], pieces["at"]))
    pieces = {name: column[order] for name, column in pieces.items()}
    takes = pieces["destination"]
    if (
        through_ranks
    ):  # in a rank's memory: the sender's, where it is within the sender's limit, or one that takes it in
        reads = carriers(hosts, destinations)[pieces["sender"], pieces["destination"]]
        takes = np.where(reads == pieces["sender"], len(hosts) + reads, reads)
    elif in_place:  # in the sender's memory, and so within the sender's limit
        near = np.asarray([[host == destination.host for destination in destinations] for host in hosts])
        takes = np.where(near[pieces["sender"], takes], len(destinations) + pieces["sender"], takes)
    pieces["round"] = divide(padded(pieces["nbytes"]), pieces["sender"], takes, limit)
    order = np.lexsort((np.arange(len(order)), pieces["destination"], pieces["sender"], pieces["round"]))
    names = ("tensor", "top", "bottom", "left", "right", "nbytes", "sender", "destination", "round")
    columns = {name: np.ascontiguousarray(pieces[name][order], dtype=np.int64) for name in names}
    return Redistribution(layouts, tuple(destinations), hosts, limit, in_place, through_ranks, **columns)


def _pieces(
    layouts: Layouts, destinations: Sequence[DestinationHost], hosts: Sequence[str]
) -> tuple[list[tuple[int, ...]], Columns]:
    """(sets of copies, what each destination needs, in order of tensors); "set": which copies there are of a piece."""
    kinds = np.column_stack(
        [np.asarray(layouts.shapes).reshape(-1, 2), layouts.items, layouts.held, layouts.needed]
    ).astype(np.int64)
    unique, members = np.unique(kinds, axis=0, return_inverse=True)
    order = np.argsort(members.reshape(-1), kind="stable")
    bounds = np.searchsorted(members.reshape(-1)[order], np.arange(len(unique) + 1))
    sets: dict[tuple[int, ...], int] = {}
    blocks = []
    for kind, (_, _, item, held, needed) in enumerate(unique.tolist()):
        tensors = order[bounds[kind] : bounds[kind + 1]]
        rows = []
        for number, destination in enumerate(destinations):
            for area, owners in wanted(layouts.patterns[held], layouts.patterns[needed], destination.workers):
                near = tuple(rank for rank in owners if hosts[rank] == destination.host) or owners
                rows.append((*area, item, number, sets.setdefault(near, len(sets))))
        if rows:
            block = np.tile(np.asarray(rows, dtype=np.int64), (len(tensors), 1))
            blocks.append(np.column_stack([np.repeat(tensors, len(rows)), block]))
    table = np.concatenate(blocks) if blocks else np.zeros((0, 8), dtype=np.int64)
    turn = (table[:, 6] + table[:, 7]) % max(1, len(destinations))  # all sets at once would fill one destination
    table = table[np.lexsort((turn, table[:, 0]))]
    names = ("tensor", "top", "bottom", "left", "right", "item", "destination", "set")
    return list(sets), _weighed(dict(zip(names, table.T, strict=True)))


def _weighed(pieces: Columns) -> Columns:
    size = (pieces["bottom"] - pieces["top"]) * (pieces["right"] - pieces["left"])
    return pieces | {"nbytes": size * pieces["item"]}


def _cut_to(pieces: Columns, limit: int) -> Columns:
    """Pieces of at most `limit` bytes: large ones are cut into bands of rows, and rows that are too long into parts."""
    for low, high, across in (("left", "right", None), ("top", "bottom", ("left", "right"))):
        width = pieces["item"] if across is None else pieces["item"] * (pieces["right"] - pieces["left"])
        fit = np.maximum(limit // width, 1)
        count = -(-(pieces[high] - pieces[low]) // fit)
        if (count > 1).any():
            pieces = _bands(pieces, low, high, count)
    return pieces


def _bands(pieces: Columns, low: str, high: str, count: np.ndarray) -> Columns:
    """Each piece as `count` bands of (nearly) equal width between `low` and `high`."""
    source = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    start = pieces[low][source]
    width = (pieces[high] - pieces[low])[source]
    parts = count[source]
    cut = {name: column[source] for name, column in pieces.items()}
    cut[low], cut[high] = start + width * number // parts, start + width * (number + 1) // parts
    return _weighed(cut)


def _sent_by(pieces: Columns, sets: list[tuple[int, ...]], ranks: int, limit: int) -> Columns:
    """The pieces with their senders, and "at": how far along each is, from 0 to 1, among those with the same copies.

    A set of copies takes turns, in runs of no more than a round's bytes, each member as long as its share is; a piece
    that crosses the end of a turn is cut between two rows.
    """
    amounts = np.bincount(pieces["set"], pieces["nbytes"], minlength=len(sets))
    divided = shares(sets, amounts, ranks)
    blocks = []
    order = np.argsort(pieces["set"], kind="stable")
    bounds = np.searchsorted(pieces["set"][order], np.arange(len(sets) + 1))
    for number, members in enumerate(sets):
        mine = {name: column[order[bounds[number] : bounds[number + 1]]] for name, column in pieces.items()}
        if amounts[number] > 0:
            blocks.append(_turns(mine, members, divided[number] / amounts[number], limit))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]} if blocks else pieces | {
        "sender": pieces["set"], "at": pieces["set"]
    }  # fmt: skip


def _turns(pieces: Columns, members: tuple[int, ...], share: np.ndarray, limit: int) -> Columns:
    end = np.cumsum(pieces["nbytes"])
    total = int(end[-1])
    if len(members) == 1:
        return pieces | {"sender": np.full(len(end), members[0]), "at": (end - pieces["nbytes"]) / total}
    turns = max(1, round(total / (len(members) * limit)))
    edges = (np.arange(turns)[:, None] + np.cumsum(share)[None, :]).ravel() * (total / turns)
    edges[-1] = total
    pieces = _cut_at(pieces, edges[:-1])
    end = np.cumsum(pieces["nbytes"])
    middle = end - pieces["nbytes"] / 2
    turn = np.minimum(np.searchsorted(edges, middle, side="right"), len(edges) - 1)
    return pieces | {"sender": np.asarray(members)[turn % len(members)], "at": (end - pieces["nbytes"]) / total}


def _cut_at(pieces: Columns, edges: np.ndarray) -> Columns:
    """The pieces, cut at the rows that are nearest to the bytes `edges` of all of them one after the other."""
    end = np.cumsum(pieces["nbytes"])
    which = np.minimum(np.searchsorted(end, edges, side="left"), len(end) - 1)
    begin, width = (
        end[which] - pieces["nbytes"][which],
        (pieces["right"] - pieces["left"])[which] * pieces["item"][which],
    )
    row = pieces["top"][which] + np.rint((edges - begin) / width).astype(np.int64)
    inside = (row > pieces["top"][which]) & (row < pieces["bottom"][which])
    cuts = np.unique(np.column_stack([which[inside], row[inside]]), axis=0)
    source = np.concatenate([np.arange(len(end)), cuts[:, 0]])
    top = np.concatenate([pieces["top"], cuts[:, 1]])
    order = np.lexsort((top, source))
    source = source[order]
    top = top[order]
    cut = {name: column[source] for name, column in pieces.items()}
    last = np.append(source[1:] != source[:-1], True)
    bottom = np.where(last, cut["bottom"], np.append(top[1:], 0))
    return _weighed(cut | {"top": top, "bottom": bottom})
