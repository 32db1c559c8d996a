"""The plan of an update between real trainer ranks and real engines.

Invariant: what is held comes from the trainer's own table and what is needed from the workers' manifests; a tensor that
one side has and the other has not is an error here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.model_files.safetensors_headers import ITEM_BYTES
from hpcrl.redistribution.holdings import merged, needed_parts
from hpcrl.redistribution.layouts import Layouts, Pattern, Worker, whole
from hpcrl.redistribution.plan import Redistribution, redistribute
from hpcrl.redistribution.rounds import padded
from hpcrl.weights.fp8 import Scheme
from hpcrl.weights.manifest import span
from hpcrl.weights.pieces.wire import HALVES, Inbox, Message, Tensor
from hpcrl.weights.route import Sharing

COLUMNS = ("tensor", "top", "bottom", "left", "right", "nbytes", "sender", "landing", "round")
Manifests = Sequence[Sequence[Mapping[str, Any]]]  #: [engine][worker]


@dataclass(frozen=True)
class HeldTensor:
    """A Hugging Face tensor on the trainer's side: shape of the whole, and which ranks hold which part."""

    shape: tuple[int, ...]
    parts: Pattern


@dataclass(frozen=True)
class Wanted:
    """A tensor as the engines want it."""

    shape: tuple[int, ...]
    dtype: str


def wanted(manifests: Manifests) -> dict[str, Wanted]:
    """What an update must bring, by name."""
    first = manifests[0][0]
    found = {name: need for name, need in first["tensors"].items() if not need["same_as"]} | dict(first["unseen"])
    return {name: Wanted(tuple(need["shape"]), need["dtype"]) for name, need in found.items()}


def coded(held: Mapping[str, HeldTensor], scheme: Scheme | None) -> dict[str, HeldTensor]:
    """The tensors as they are sent: a quantised matrix has scales beside it, which all who hold some of it know."""
    found: dict[str, HeldTensor] = {}
    for name, tensor in held.items():
        found[name] = tensor
        if scheme is not None and scheme.takes(name, tensor.shape):
            shape = scheme.scale_shape(tensor.shape)
            owners = sorted({rank for part in tensor.parts for rank in part.who})
            found[scheme.scale_name(name)] = HeldTensor(shape, (whole(shape, owners),))
    return found


def check_codes(held: Mapping[str, HeldTensor], needs: Mapping[str, Wanted], scheme: Scheme | None) -> None:
    """HpcrlError where one side has FP8 and the other not: without scales the numbers would mean nothing."""
    for name, tensor in held.items():
        ours = scheme is not None and scheme.takes(name, tensor.shape)
        if name in needs and ours != ("float8" in needs[name].dtype):
            raise HpcrlError(
                f"the trainer's {name} is {'' if ours else 'not '}quantised, the engines need {needs[name].dtype}"
            )


def layouts_of(held: Mapping[str, HeldTensor], manifests: Manifests) -> Layouts:
    """Both sides.  HpcrlError for a tensor that only one of them has, or in another shape."""
    needs, layouts = wanted(manifests), Layouts()
    if extra := [name for name in held if name not in needs]:
        raise HpcrlError(f"the trainer's {extra[0]} is no tensor of the engines")
    if missing := sorted(needs.keys() - held.keys()):
        raise HpcrlError(f"the trainer has not {len(missing)} tensors of the engines, the first is {missing[0]}")
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

    hosts: whereabouts of each rank; limit: bytes of --update-weight-buffer-size; sharing: who gets bytes once together:
    all workers of a host, where processes may open each other's memory; those of an engine on a host; or every worker
    its own; in_place: workers load what lies in memory of their host from there.
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
class Parcel:
    """What a rank has for one landing in one round; offset: in a half of its memory; pieces: rows of `pieces_of`."""

    landing: int
    half: int
    offset: int
    nbytes: int
    pieces: np.ndarray
    places: np.ndarray  #: of each piece, in the parcel


def parcels(own: np.ndarray) -> list[list[Parcel]]:
    """A rank's rounds, in order: only those in which it sends."""
    rounds: list[list[Parcel]] = []
    column = {name: own[:, number] for number, name in enumerate(COLUMNS)}
    for number in np.unique(column["round"]):
        mine = own[column["round"] == number]
        offset = 0
        found = []
        for landing in np.unique(mine[:, COLUMNS.index("landing")]):
            pieces = mine[mine[:, COLUMNS.index("landing")] == landing]
            ends = np.cumsum(padded(pieces[:, COLUMNS.index("nbytes")]))
            places = np.concatenate([[0], ends[:-1]])
            found.append(Parcel(int(landing), len(rounds) % HALVES, offset, int(ends[-1]), pieces, places))
            offset += int(ends[-1])
        rounds.append(found)
    return rounds


def inboxes(plan: Redistribution, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> list[Inbox]:
    """What each landing is told; members: the ranks, then the workers."""
    names, first = plan.layouts.names, plan.ranks
    tensors = tuple(Tensor(name, dtypes[name], shapes[name]) for name in names)
    data = to_bytes(plan)
    arriving: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for rank in range(plan.ranks):
        for number in parcels(pieces_of(rank, data)):
            for parcel in number:
                at = int(parcel.pieces[0, COLUMNS.index("round")])
                arriving.setdefault((parcel.landing, at), []).append((rank, parcel))
    porters = [first + landing.workers[0] for landing in plan.landings]
    found = []
    for number, landing in enumerate(plan.landings):
        root, up = plan.root(number), plan.relays[number]
        rounds = []
        for at in sorted(at for other, at in arriving if other == root):
            near = [plan.hosts[rank] == landing.host for rank, _ in arriving[root, at]]
            rounds.append(_messages(arriving[root, at], near, porters[up] if up >= 0 else None, len(rounds) % HALVES))
        onward = tuple(porters[other] for other, above in enumerate(plan.relays) if above == number)
        workers = tuple(first + worker for worker in landing.workers)
        found.append(Inbox(porters[number], workers, plan.limit, tensors, tuple(rounds), onward))
    return found


def _messages(arrived: list[tuple[int, Parcel]], near: list[bool], relay: int | None, half: int) -> tuple[Message, ...]:
    """One round of a landing; relay: the porter that hands it on."""
    found, end = [], 0
    for (rank, parcel), close in zip(arrived, near, strict=True):
        areas = parcel.pieces[:, [COLUMNS.index(name) for name in ("tensor", "top", "bottom", "left", "right")]]
        pieces = tuple(map(tuple, np.column_stack([areas, parcel.places]).tolist()))
        if close:
            found.append(Message(rank, True, parcel.half, parcel.offset, parcel.nbytes, pieces))
        else:
            found.append(Message(rank if relay is None else relay, False, half, end, parcel.nbytes, pieces))
            end += parcel.nbytes
    return tuple(found)
