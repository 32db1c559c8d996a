"""The messages of a plan: what each rank has for each destination host in each round, and what each host learns of it.

A plan of a model of 355B has some 150,000 pieces in 100,000 messages, so whatever is done for each of them is done by
columns.

Invariants: sender and receiver find the same places, since both come from `MessageTable`; a message of a sender begins
where its previous one of the round ends, and every piece at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpcrl.weights.pieces.wire import HALVES, Message, ReceivePlan, WireTensor
from hpcrl.weights.redistribution.loads import padded
from hpcrl.weights.redistribution.plan import Redistribution

PLANNED = ("tensor", "top", "bottom", "left", "right", "nbytes", "sender", "destination", "round")
#: sender: the rank in whose memory a piece lies in its round; source: the rank that packed it.  They differ where a
#: rank takes a piece in for its host, which is then there twice, once in the memory of each.
COLUMNS = (*PLANNED, "source")
AREA = slice(0, 5)  #: of COLUMNS: the tensor and the rectangle
NBYTES, SENDER, DESTINATION, ROUND, SOURCE = range(5, 10)


def pieces_in_memory(plan: Redistribution) -> np.ndarray:
    """Every piece in the memory of every rank: int64 [pieces, COLUMNS], in order of (round, sender, destination,
    source); of the sources the rank itself is first, as what it packs is ready first: the order of messages is that in
    which they are announced."""
    found = np.column_stack([getattr(plan, name) for name in (*PLANNED, "sender")])
    if not plan.through_ranks:
        return found
    landed = found.copy()
    landed[:, SENDER] = plan.carrier()
    found = np.concatenate([found, landed[plan.far()]])
    taken_in = found[:, SOURCE] != found[:, SENDER]
    keys = (found[:, SOURCE], taken_in, found[:, DESTINATION], found[:, SENDER], found[:, ROUND])
    return np.ascontiguousarray(found[np.lexsort((np.arange(len(found)), *keys))])


def to_bytes(plan: Redistribution) -> bytes:
    """The pieces, for the other ranks."""
    return np.ascontiguousarray(pieces_in_memory(plan).T).astype("<i8").tobytes()


def pieces_of(rank: int, data: bytes) -> np.ndarray:
    """This rank's rows of `to_bytes`: int64 [pieces, COLUMNS]."""
    table = np.frombuffer(data, dtype="<i8").reshape(len(COLUMNS), -1).T
    return np.ascontiguousarray(table[table[:, COLUMNS.index("sender")] == rank])


@dataclass(frozen=True)
class MessageTable:
    """Columns over the messages of `pieces`, in its order; all int64.

    Attributes:
        pieces: [pieces, COLUMNS], in order of (round, sender, destination, source).
        places: [pieces], where each begins in its message.
        edges: [messages + 1], the first piece of each message.
        sender, destination, round, source, nbytes: [messages].
        offset: [messages], where each begins in a half of its sender's memory.
        half: [messages], which half: a sender's rounds take turns.
    """

    pieces: np.ndarray
    places: np.ndarray
    edges: np.ndarray
    sender: np.ndarray
    destination: np.ndarray
    round: np.ndarray
    source: np.ndarray
    nbytes: np.ndarray
    offset: np.ndarray
    half: np.ndarray

    @classmethod
    def from_pieces(cls, pieces: np.ndarray) -> MessageTable:
        """The table of some rows of a plan, in its order."""
        sizes = padded(pieces[:, NBYTES])
        begin = _starts(pieces[:, [ROUND, SENDER, DESTINATION, SOURCE]])
        edges = np.append(begin, len(pieces))
        sender, destination, number, source = (pieces[begin, column] for column in (SENDER, DESTINATION, ROUND, SOURCE))
        ends = np.append(0, np.cumsum(sizes))
        nbytes = np.diff(ends[edges])
        turn = _starts(np.column_stack([number, sender]))  # the first message of each sender's round
        which = np.repeat(np.arange(len(turn)), np.diff(np.append(turn, len(begin))))
        return cls(
            pieces=pieces,
            places=ends[:-1] - np.repeat(ends[begin], np.diff(edges)),
            edges=edges,
            sender=sender,
            destination=destination,
            round=number,
            source=source,
            nbytes=nbytes,
            offset=ends[begin] - ends[begin[turn]][which],
            half=_counted(sender[turn])[which] % HALVES,
        )


def _starts(keys: np.ndarray) -> np.ndarray:
    """The first row of each run of equal rows."""
    if not len(keys):
        return np.zeros(0, dtype=np.int64)
    return np.append(0, np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1)


def _counted(values: np.ndarray) -> np.ndarray:
    """How often each value has come before."""
    order = np.argsort(values, kind="stable")
    begin = _starts(values[order][:, None])
    found = np.empty(len(values), dtype=np.int64)
    found[order] = np.arange(len(values)) - np.repeat(begin, np.diff(np.append(begin, len(values))))
    return found


@dataclass(frozen=True)
class PackedShards:
    """What a rank has for one destination host in one round.

    Attributes:
        source: the rank that packs it: this one, or one of another host, for whose bytes this one has room.
        half, offset: of its memory, and where in that half.
        pieces: rows of `pieces_of`.
        places: where each piece begins in it.
    """

    source: int
    destination: int
    half: int
    offset: int
    nbytes: int
    pieces: np.ndarray
    places: np.ndarray


def packed_shards(own: np.ndarray) -> list[list[PackedShards]]:
    """A rank's rounds, in order: only those in which it sends, or takes something in for its host."""
    table = MessageTable.from_pieces(own)
    rounds: list[list[PackedShards]] = []
    last = -1
    for at, number in enumerate(table.round.tolist()):
        if number != last:
            rounds.append([])
            last = number
        mine = slice(table.edges[at], table.edges[at + 1])
        message = (
            int(column[at]) for column in (table.source, table.destination, table.half, table.offset, table.nbytes)
        )
        rounds[-1].append(PackedShards(*message, own[mine], table.places[mine]))
    return rounds


def receive_plans(
    plan: Redistribution, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> list[ReceivePlan]:
    """The message for each destination host; members: the ranks, then the workers."""
    first = plan.ranks
    tensors = tuple(WireTensor(name, dtypes[name], shapes[name]) for name in plan.layouts.names)
    table = MessageTable.from_pieces(pieces_in_memory(plan))
    pieces = list(map(tuple, np.column_stack([table.pieces[:, AREA], table.places]).tolist()))
    found = []
    for number, destination in enumerate(plan.destinations):
        there = np.asarray([host == destination.host for host in plan.hosts])
        reaches = table.destination == number
        mine = np.flatnonzero(reaches & there[table.sender] if plan.through_ranks else reaches)
        near = there[table.sender[mine]]
        rounds = _rounds(table, mine, near, pieces)
        workers = tuple(first + worker for worker in destination.workers)
        found.append(ReceivePlan(workers[0], workers, plan.limit, tensors, tuple(rounds)))
    return found


def _rounds(
    table: MessageTable, mine: np.ndarray, near: np.ndarray, pieces: list[tuple[int, ...]]
) -> Iterator[tuple[Message, ...]]:
    """The rounds of a destination host.

    Args:
        mine: which messages reach it.
        near: of each, whether it lies in its sender's memory.
        pieces: of all messages: (tensor, top, bottom, left, right, place).
    """
    columns = (table.round, table.sender, table.half, table.offset, table.nbytes, table.edges[:-1], table.edges[1:])
    messages: list[Message] = []
    turn = end = 0
    last = -1
    for close, (number, sender, half, offset, nbytes, begin, stop) in zip(
        near.tolist(), np.column_stack([column[mine] for column in columns]).tolist(), strict=True
    ):
        if number != last and messages:
            yield tuple(messages)
            messages = []
            turn += 1
            end = 0
        last = number
        inside = tuple(pieces[begin:stop])
        if close:
            messages.append(Message(sender, True, half, offset, nbytes, inside))
        else:
            messages.append(Message(sender, False, turn % HALVES, end, nbytes, inside))
            end += nbytes
    if messages:
        yield tuple(messages)
