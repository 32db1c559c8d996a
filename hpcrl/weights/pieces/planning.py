"""The plan of a resharded update between real trainer ranks and real engines.

Invariant: what is held comes from the trainer's own table and what is needed from the workers' manifests; a tensor that
only one side has is an error here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.model_files.safetensors_files import ITEM_BYTES
from hpcrl.redistribution.layouts import Layouts, Pattern, Worker, merged, needed_parts, whole
from hpcrl.redistribution.loads import padded
from hpcrl.redistribution.plan import Redistribution, redistribute
from hpcrl.weights.fp8 import Scheme
from hpcrl.weights.pieces.wire import HALVES, Message, ReceivePlan, WireTensor, span
from hpcrl.weights.route import Sharing

COLUMNS = ("tensor", "top", "bottom", "left", "right", "nbytes", "sender", "destination", "round")
Manifests = Sequence[Sequence[Mapping[str, Any]]]  #: [engine][worker]


@dataclass(frozen=True)
class HeldTensor:
    """A Hugging Face tensor on the trainer's side: shape of the whole, and which ranks hold which part."""

    shape: tuple[int, ...]
    parts: Pattern


@dataclass(frozen=True)
class NeededTensor:
    """A tensor as the engines want it."""

    shape: tuple[int, ...]
    dtype: str


def needed_tensors(manifests: Manifests) -> dict[str, NeededTensor]:
    """What an update must bring, by name."""
    first = manifests[0][0]
    found = {name: need for name, need in first["tensors"].items() if not need["same_as"]} | dict(first["unseen"])
    return {name: NeededTensor(tuple(need["shape"]), need["dtype"]) for name, need in found.items()}


def coded(held: Mapping[str, HeldTensor], scheme: Scheme | None) -> dict[str, HeldTensor]:
    """The tensors as they are sent: a quantised matrix comes with scales, known to every rank that holds some of it."""
    found: dict[str, HeldTensor] = {}
    for name, tensor in held.items():
        found[name] = tensor
        if scheme is not None and scheme.takes(name, tensor.shape):
            shape = scheme.scale_shape(tensor.shape)
            owners = sorted({rank for part in tensor.parts for rank in part.who})
            found[scheme.scale_name(name)] = HeldTensor(shape, (whole(shape, owners),))
    return found


def check_codes(held: Mapping[str, HeldTensor], needs: Mapping[str, NeededTensor], scheme: Scheme | None) -> None:
    """Raise HpcrlError where one side has FP8 and the other has not: codes are meaningless without their scales."""
    for name, tensor in held.items():
        ours = scheme is not None and scheme.takes(name, tensor.shape)
        if name in needs and ours != ("float8" in needs[name].dtype):
            raise HpcrlError(
                f"the trainer's {name} is {'' if ours else 'not '}quantised, the engines need {needs[name].dtype}"
            )


def layouts_of(held: Mapping[str, HeldTensor], manifests: Manifests) -> Layouts:
    """Both sides.

    Raises:
        HpcrlError: for a tensor that only one of them has, or in another shape.
    """
    needs = needed_tensors(manifests)
    layouts = Layouts()
    if extra := [name for name in held if name not in needs]:
        raise HpcrlError(f"the trainer's {extra[0]} is not a tensor of the engines")
    if missing := sorted(needs.keys() - held.keys()):
        raise HpcrlError(f"the trainer lacks {len(missing)} tensors of the engines, the first is {missing[0]}")
    numbers: dict[int, int] = {}
    for name, tensor in held.items():
        need = needs[name]
        if tensor.shape != need.shape:
            raise HpcrlError(
                f"the trainer's {name} has shape {list(tensor.shape)}, the engines need {list(need.shape)}"
            )
        if id(tensor.parts) not in numbers:
            numbers[id(tensor.parts)] = layouts.pattern(merged(tensor.parts))
        needed = layouts.pattern(needed_parts(need.shape, _spans(name, need.shape, manifests)))
        layouts.add(name, need.shape, ITEM_BYTES[need.dtype], numbers[id(tensor.parts)], needed)
    return layouts


def _spans(name: str, shape: tuple[int, ...], manifests: Manifests) -> Iterator[tuple[int, Any, Any]]:
    workers = [worker for engine in manifests for worker in engine]
    for number, worker in enumerate(workers):
        yield number, *span(worker, name, shape)


def make(
    held: Mapping[str, HeldTensor],
    manifests: Manifests,
    hosts: Sequence[str],
    limit: int,
    sharing: Sharing,
    in_place: bool = False,
) -> Redistribution:
    """The plan.

    Args:
        held: the trainer's tensors, by name, as they are sent.
        manifests: of every worker of every engine.
        hosts: the process identity of each rank.
        limit: bytes of --update-weight-buffer-size.
        sharing: which workers receive bytes once together: all of a host, where processes may open each other's memory;
            those of an engine on a host; or none.
        in_place: workers load what is in memory of their host from there.
    """
    workers = []
    for number, engine in enumerate(manifests):
        for at, worker in enumerate(engine):
            apart = {"host": "", "engine": f"engine {number} on ", "worker": f"worker {at} of engine {number} on "}[
                sharing
            ]
            workers.append(Worker(number, f"{apart}{worker['where']}"))
    return redistribute(layouts_of(held, manifests), workers, hosts, limit // HALVES, in_place)


def to_bytes(plan: Redistribution) -> bytes:
    """The pieces, for the other ranks."""
    return np.stack([getattr(plan, name) for name in COLUMNS]).astype("<i8").tobytes()


def pieces_of(rank: int, data: bytes) -> np.ndarray:
    """This rank's rows of `to_bytes`: int64 [pieces, COLUMNS]."""
    table = np.frombuffer(data, dtype="<i8").reshape(len(COLUMNS), -1).T
    return np.ascontiguousarray(table[table[:, COLUMNS.index("sender")] == rank])


@dataclass(frozen=True)
class PackedShards:
    """What a rank has for one destination host in one round.

    Attributes:
        offset: in a half of its memory.
        pieces: rows of `pieces_of`.
    """

    destination: int
    half: int
    offset: int
    nbytes: int
    pieces: np.ndarray
    places: np.ndarray  #: where each piece begins in it


def packed_shards(own: np.ndarray) -> list[list[PackedShards]]:
    """A rank's rounds, in order: only those in which it sends."""
    rounds: list[list[PackedShards]] = []
    column = {name: own[:, number] for number, name in enumerate(COLUMNS)}
    for number in np.unique(column["round"]):
        mine = own[column["round"] == number]
        offset = 0
        found = []
        for destination in np.unique(mine[:, COLUMNS.index("destination")]):
            pieces = mine[mine[:, COLUMNS.index("destination")] == destination]
            ends = np.cumsum(padded(pieces[:, COLUMNS.index("nbytes")]))
            places = np.concatenate([[0], ends[:-1]])
            found.append(PackedShards(int(destination), len(rounds) % HALVES, offset, int(ends[-1]), pieces, places))
            offset += int(ends[-1])
        rounds.append(found)
    return rounds


def receive_plans(
    plan: Redistribution, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> list[ReceivePlan]:
    """What each destination host is told; members: the ranks, then the workers."""
    names = plan.layouts.names
    first = plan.ranks
    tensors = tuple(WireTensor(name, dtypes[name], shapes[name]) for name in names)
    data = to_bytes(plan)
    arriving: dict[tuple[int, int], list[tuple[int, PackedShards]]] = {}
    for rank in range(plan.ranks):
        for number in packed_shards(pieces_of(rank, data)):
            for packed in number:
                at = int(packed.pieces[0, COLUMNS.index("round")])
                arriving.setdefault((packed.destination, at), []).append((rank, packed))
    host_leaders = [first + destination.workers[0] for destination in plan.destinations]
    found = []
    for number, destination in enumerate(plan.destinations):
        root = plan.root(number)
        up = plan.relays[number]
        rounds = []
        for at in sorted(at for other, at in arriving if other == root):
            near = [plan.hosts[rank] == destination.host for rank, _ in arriving[root, at]]
            rounds.append(
                _messages(arriving[root, at], near, host_leaders[up] if up >= 0 else None, len(rounds) % HALVES)
            )
        onward = tuple(host_leaders[other] for other, above in enumerate(plan.relays) if above == number)
        workers = tuple(first + worker for worker in destination.workers)
        found.append(ReceivePlan(host_leaders[number], workers, plan.limit, tensors, tuple(rounds), onward))
    return found


def _messages(
    arrived: list[tuple[int, PackedShards]], near: list[bool], relay: int | None, half: int
) -> tuple[Message, ...]:
    """One round of a destination host.

    Args:
        relay: the host leader that forwards it.
    """
    found = []
    end = 0
    for (rank, packed), close in zip(arrived, near, strict=True):
        areas = packed.pieces[:, [COLUMNS.index(name) for name in ("tensor", "top", "bottom", "left", "right")]]
        pieces = tuple(map(tuple, np.column_stack([areas, packed.places]).tolist()))
        if close:
            found.append(Message(rank, True, packed.half, packed.offset, packed.nbytes, pieces))
        else:
            found.append(Message(rank if relay is None else relay, False, half, end, packed.nbytes, pieces))
            end += packed.nbytes
    return tuple(found)
