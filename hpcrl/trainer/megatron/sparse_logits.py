"""The output layer only where a token is trained on.

A prompt's rows, and padding, need no logits: at a vocabulary of 150 000 these are the largest tensors of a step.
Invariant: logits and gradients are those of the whole output, whose other rows nobody looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


@contextmanager
def only_rows(model: GPTModel, rows: torch.Tensor) -> Iterator[None]:
    """Inside, `model` gives logits of `rows` (int64 [r], which of the t) alone: [1, r, columns] in place of [1, t, columns].

    Under sequence parallelism a rank has only a part of the rows until the layer gathers them: they are gathered before
    it, and the layer takes them as it does without.  A chunk without an output layer is left alone.
    """
    if not model.post_process:
        yield
        return
    layer = model.output_layer
    split = layer.sequence_parallel

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args  # [t, 1, hidden size], of t / TP rows where they are split
        if split:  # backward: each rank keeps its own rows of a gradient that the layer has summed
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden.index_select(0, rows), *rest

    handle = layer.register_forward_pre_hook(select)
    layer.sequence_parallel = False
    try:
        yield
    finally:
        layer.sequence_parallel = split
        handle.remove()
