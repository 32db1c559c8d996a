"""Stand-ins for Transformer Engine's attention, rotary embedding and norm on the fake device: what they keep for the backward pass, and
nothing of what they compute.

Attention keeps queries, keys, values, what it gives and a number a row and head; a norm its input and a number a row;
the embedding nothing.  What only the device knows, how many rows each expert gets, is equally many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hpcrl.planning.fake_libraries.te_kernels import Attention, Norm, Rope


def _counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """How many rows go to each expert or rank, in Megatron's dispatcher of tokens: equally many."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    dispatcher = sys._getframe(1).f_locals["self"]
    own = tensor is dispatcher.input_splits or tensor is dispatcher.output_splits
    rows = dispatcher.num_out_tokens * (1 if own else dispatcher.tp_size)
    made = torch.full(tensor.shape, rows // tensor.numel())
    return made.numpy() if as_numpy else made


@contextmanager
def fused(sent: tuple[int, ...]) -> Iterator[None]:
    """Within, the local layers keep what the fused ones of a GPU would.

    Args:
        sent: the shape of what goes from one pipeline stage to the next.
    """
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.moe import token_dispatcher

    from hpcrl.trainer.megatron.packed_attention import PackedAttention, RMSNorm

    def attend(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return Attention.apply(query, key, value).flatten(1)

    def norm(self: Any, x: Any) -> Any:
        return Norm.apply(x, self.weight)

    def rotate(x: Any, *_: Any, **__: Any) -> Any:
        return Rope.apply(x)

    def shapes(*_: Any, **__: Any) -> Any:  # a mock would keep the tensors that it is called with
        return sent, sent

    with (
        mock.patch.object(PackedAttention, "forward", attend),
        mock.patch.object(RMSNorm, "forward", norm),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _counts),
        mock.patch.object(P2PCommunicator, "_communicate_shapes", shapes),
        mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", rotate),
    ):
        yield
