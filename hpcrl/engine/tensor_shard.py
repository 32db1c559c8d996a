"""One tensor of a checkpoint as a worker of an engine holds it.

Invariant: what crosses to the trainer (`to_wire`) is plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Segment = tuple[int, int]  #: (start, length)
Cut = tuple[tuple[Segment, ...], Segment | None]  #: rows, columns or None for all


@dataclass(frozen=True)
class TensorShard:
    """One tensor of the checkpoint on this worker.

    shape: of the whole tensor; rows, columns: the parts of its first and second dimension that this worker holds, in
    the order in which it holds them (columns None: all); show(): that part as the model uses it; same_as: the tensor
    that this one is tied to and which alone is sent.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[Segment, ...]
    columns: Segment | None
    show: Callable[[], torch.Tensor]
    same_as: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """Everything but the tensor, as plain values."""
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            "rows": self.rows,
            "columns": self.columns,
            "same_as": self.same_as,
        }


def in_blocks(segment: Segment, size: int, block: int) -> Segment | None:
    """A segment of `size` elements, counted in blocks; None if a block lies over its edge."""
    start, length = segment
    if start % block or (length % block and start + length != size):
        return None
    return start // block, -(-length // block)
