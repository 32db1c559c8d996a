"""Whether the engines hold the same bits as the trainer: digests of tensors, compared after an update.

    comparison = Comparison(manifests, ties)
    comparison.note(name, tensor)          # every tensor as it was sent
    comparison.compare(calls)              # Differs

Invariants: what an engine is compared with comes from the trainer's whole tensors, whichever way it was sent; two
tensors of one dtype have the same digest if and only if all their values are bitwise equal (up to blake2b's 128 bits),
where the two zeros of floating point count as one: an engine can show a packed weight only as a product with the
identity, which turns -0.0 into 0.0 and keeps every other finite value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.errors import PeerError
from hpcrl.weights.pieces.wire import span
from hpcrl.weights.worker_calls import WorkerCalls

if TYPE_CHECKING:
    import torch

_WITH_NEGATIVE_ZERO = {"float64", "float32", "float16", "bfloat16"}


def dtype_name(tensor: torch.Tensor) -> str:
    """torch.float32 -> "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def digest(tensor: torch.Tensor) -> str:
    """Hex digest of shape, dtype and values."""
    import torch

    name = dtype_name(tensor)
    flat = tensor.detach().cpu().contiguous()
    if name in _WITH_NEGATIVE_ZERO:
        flat = flat + 0.0
    head = f"{name}{list(tensor.shape)}".encode()
    found = hashlib.blake2b(head, digest_size=16)
    found.update(flat.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def cut(tensor: torch.Tensor, rows: Sequence[Sequence[int]], columns: Sequence[int] | None) -> torch.Tensor:
    """The part of a tensor that one engine worker holds.

    Args:
        rows: (start, length) of the parts of the first dimension, in the worker's order.
        columns: the part of the second.
    """
    import torch

    if rows:
        parts = [tensor.narrow(0, start, length) for start, length in rows]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensor if columns is None else tensor.narrow(1, *columns)


Expected = list[dict[str, dict[str, str]]]  #: [engine][name of the worker][name] -> digest


class Differs(PeerError):
    """An engine holds other bits than were sent."""


class Comparison:
    """What each worker's model must multiply with (--check-weight-update-equal).

    Attributes:
        manifests: [engine][worker].
        ties: name -> the names of those tied to it.
    """

    def __init__(self, manifests: Sequence[Sequence[Mapping[str, Any]]], ties: Mapping[str, Sequence[str]]) -> None:
        self.manifests = manifests
        self.ties = ties
        self.expected: Expected = [{} for _ in manifests]

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """What each worker must have of a tensor, also under the names of the tensors tied to it."""
        known: dict[str, str] = {}  # most workers hold the same parts
        for workers, mine in zip(self.manifests, self.expected, strict=True):
            for worker in workers:
                for other in (name, *self.ties.get(name, ())):
                    rows, columns = span(worker, other, tuple(tensor.shape))
                    part = json.dumps([rows, columns])
                    if part not in known:
                        known[part] = digest(cut(tensor, rows, columns))
                    mine.setdefault(worker["worker"], {})[other] = known[part]

    def compare(self, calls: WorkerCalls) -> None:
        """Differs names the tensors that an engine does not hold as they were sent."""
        answers = calls.call_each("comparing", "hpcrl_check", [[json.dumps(mine)] for mine in self.expected])
        for engine, workers in zip(calls.fleet.engines, answers, strict=True):
            for worker in workers:
                if wrong := [*worker["different"], *worker["unknown"]]:
                    raise Differs(
                        f"{engine}: after the update {len(wrong)} tensors are not what was sent: {', '.join(wrong[:5])}"
                    )
