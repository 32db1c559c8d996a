"""Fingerprints of tensors: how trainer and engine find out that they hold the same bits.

Invariant: two tensors of one dtype have the same digest if and only if all their values are bitwise equal (up to
blake2b's 128 bits), where the two zeros of floating point count as one: an engine can show a packed weight only as a
product with the identity, which turns -0.0 into 0.0 and keeps every other finite value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WITH_NEGATIVE_ZERO = {"float64", "float32", "float16", "bfloat16"}


def digest(tensor: torch.Tensor) -> str:
    """Hex digest of shape, dtype and values."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.detach().cpu().contiguous()
    if name in _WITH_NEGATIVE_ZERO:
        flat = flat + 0.0
    head = f"{name}{list(tensor.shape)}".encode()
    found = hashlib.blake2b(head, digest_size=16)
    found.update(flat.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def cut(tensor: torch.Tensor, rows: Sequence[Sequence[int]], columns: Sequence[int] | None) -> torch.Tensor:
    """The part of a tensor that one engine worker holds.

    rows: (start, length) of the parts of the first dimension, in the worker's order; columns: the part of the second.
    """
    import torch

    if rows:
        parts = [tensor.narrow(0, start, length) for start, length in rows]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensor if columns is None else tensor.narrow(1, *columns)
