"""What shape a pipeline stage is sent, from the packing that every stage has, in place of Megatron's exchange of it.

Packed micro-batches differ in length, and Megatron then sends each shape ahead of its tensor: the host writes it to the
device, waits until the device is idle, and reads the neighbour's, with every message.  Without virtual stages all
activations and all gradients come in the order of the micro-batches, whose lengths all stages know.

Invariants: nothing is asked of the device, and nothing is exchanged, in a pass whose shapes are known; what a stage
sends is compared with what its receiver expects; with virtual stages, whose order is another one, the exchange is
Megatron's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpcrl.errors import HpcrlError
from hpcrl.trainer.megatron.replaced import STOCK

Shape = list[int]
_passes: list[PassShapes] = []  # that under way, if its shapes are known


class PassShapes:
    """Shapes of what goes between stages in one pass, by micro-batch."""

    def __init__(self, rows: Sequence[int], width: int) -> None:
        self._shapes = [[count, 1, width] for count in rows]
        self._done: Counter[str] = Counter()

    def expect(self, way: str) -> Shape:
        """That of the next tensor on this way."""
        self._done[way] += 1
        return self._shapes[self._done[way] - 1]

    def check(self, way: str, sent: torch.Tensor | None) -> None:
        """Raise HpcrlError if the next tensor on this way has another shape than its receiver expects."""
        if sent is not None and list(sent.shape) != (expected := self.expect(way)):
            raise HpcrlError(
                f"a pipeline stage sends {list(sent.shape)} where the next one expects {expected}",
                "--custom-model-provider-path must give activations of [rows, 1, hidden size]",
            )


@contextmanager
def known_shapes(rows: Sequence[int], width: int) -> Iterator[None]:
    """Around a pass without virtual stages.

    Args:
        rows: of each micro-batch, those that a rank has of an activation.
        width: its columns.
    """
    _passes.append(PassShapes(rows, width))
    try:
        yield
    finally:
        _passes.pop()


def communicate_shapes(
    communicator: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[Shape, Shape]:
    """Shapes of the activation that comes from the previous stage and the gradient that comes from the next; of what
    does not come, Megatron's own answer."""
    if not _passes:
        return STOCK["_communicate_shapes"](communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    shapes = _passes[-1]
    shapes.check("to next", tensor_send_next)
    shapes.check("to previous", tensor_send_prev)
    nothing = [0, 0, 0]
    return (
        shapes.expect("from previous") if recv_prev else nothing,
        shapes.expect("from next") if recv_next else nothing,
    )
