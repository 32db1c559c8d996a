"""The plan of an update between real trainer ranks and real engines.

Invariant: what is held comes from the trainer's own table and what is needed from the workers' manifests; a tensor that
only one side has is an error here, before anything is sent.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.errors import HpcrlError
from hpcrl.models.files.fp8 import Scheme, Stream
from hpcrl.models.files.safetensors_files import ITEM_BYTES
from hpcrl.weights.pieces.wire import round_bytes, span
from hpcrl.weights.redistribution.layouts import Layouts, Pattern, Worker, merged, needed_parts, whole
from hpcrl.weights.redistribution.plan import Redistribution, redistribute
from hpcrl.weights.update_backend import Sharing, destination_host

Manifests = Sequence[Sequence[Mapping[str, Any]]]  #: [engine][worker]


@dataclass(frozen=True)
class HeldTensor:
    """A Hugging Face tensor on the trainer's side: shape of the whole, and which ranks hold which part."""

    shape: tuple[int, ...]
    parts: Pattern


class Source(Protocol):
    """All ranks of the trainer, as rank 0 directs them (`hpcrl/trainer/weight_export.py`)."""

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        """Who holds which part of each tensor, and the process identity of each rank."""

    def join(self, command: Any, plan: bytes) -> None:
        """Every rank joins the workers' group, and keeps its part of the plan."""

    def prepare(self) -> None:
        """What can be done while engines still generate."""

    def send(self) -> int:
        """Every rank sends its pieces once; bytes of them all."""

    def abort(self) -> None:
        """Called from another thread: make the operation that is under way on rank 0 fail."""

    def gathered(self) -> Stream:
        """Every whole tensor, valid on rank 0."""

    def share(self, command: Any, checked: Callable[[Stream], Stream], client: Any) -> None:
        """Every rank packs all tensors into memory of its GPU, which engines open (`VllmIpcUpdate`)."""

    def finish_update(self) -> None:
        """The ranks have nothing more to do in this update."""

    def follow(self) -> None:
        """On the other ranks: take part in what rank 0 asks for, until it has nothing more to ask."""


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


def sent_whole(manifests: Manifests) -> list[str]:
    """The tensors that every worker gets whole, since its layer does not say which part it needs."""
    first = manifests[0][0]
    return [name for name in first["unseen"] if name not in first.get("cuts", {})]


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


def check_tensors(held: Mapping[str, HeldTensor], manifests: Manifests) -> None:
    """Raise HpcrlError for a tensor that only trainer or engines have, or in another shape."""
    needs = needed_tensors(manifests)
    if extra := [name for name in held if name not in needs]:
        raise HpcrlError(f"the trainer's {extra[0]} {stranger(extra[0], manifests)}")
    if missing := sorted(needs.keys() - held.keys()):
        raise HpcrlError(f"the trainer lacks {len(missing)} tensors of the engines, the first is {missing[0]}")
    for name, tensor in held.items():
        if tensor.shape != needs[name].shape:
            raise HpcrlError(
                f"the trainer's {name} has shape {list(tensor.shape)}, the engines need {list(needs[name].shape)}"
            )


def layouts_of(held: Mapping[str, HeldTensor], manifests: Manifests) -> Layouts:
    """Both sides.

    Raises:
        HpcrlError: as `check_tensors`.
    """
    check_tensors(held, manifests)
    needs = needed_tensors(manifests)
    layouts = Layouts()
    numbers: dict[int, int] = {}
    alike = _alike(manifests)
    for name, tensor in held.items():
        need = needs[name]
        if id(tensor.parts) not in numbers:
            numbers[id(tensor.parts)] = layouts.pattern(merged(tensor.parts))
        spans = ((workers, *span(worker, name, need.shape)) for worker, workers in alike)
        needed = layouts.pattern(needed_parts(need.shape, spans))
        layouts.add(name, need.shape, ITEM_BYTES[need.dtype], numbers[id(tensor.parts)], needed)
    return layouts


def stranger(name: str, manifests: Manifests) -> str:
    """What a tensor is that an update must not bring."""
    known = manifests[0][0]["tensors"] | dict(manifests[0][0]["unseen"])
    if owner := known.get(name, {}).get("same_as"):
        return f"is tied to {owner} in the engines, which alone is to be sent"
    near = difflib.get_close_matches(name, known, 1)
    return f"is not a tensor of the engines{f', nearest is {near[0]}' if near else ''}"


def _alike(manifests: Manifests) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Manifests with the workers that they are of: engines that are alike hold the same in the same places."""
    found: list[tuple[Mapping[str, Any], list[int]]] = []
    number = 0
    for engine in manifests:
        for at, worker in enumerate(engine):
            twin = found[at] if at < len(manifests[0]) and at < len(found) else None
            if twin and twin[0]["tensors"] == worker["tensors"] and twin[0].get("cuts") == worker.get("cuts"):
                twin[1].append(number)
            else:
                found.append((worker, [number]))
            number += 1
    return found


def make(
    held: Mapping[str, HeldTensor],
    manifests: Manifests,
    hosts: Sequence[str],
    limit: int,
    sharing: Sharing,
    in_place: bool = False,
    through_ranks: bool = False,
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
        through_ranks: they read all of it in memory of ranks of their host.
    """
    workers = [
        Worker(number, destination_host(sharing, number, at, worker["where"]))
        for number, engine in enumerate(manifests)
        for at, worker in enumerate(engine)
    ]
    each = round_bytes(limit, hosts, through_ranks)
    return redistribute(layouts_of(held, manifests), workers, hosts, each, in_place, through_ranks)
