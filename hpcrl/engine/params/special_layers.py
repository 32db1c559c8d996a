"""Layers that vLLM does not hold as a linear layer is held: the matrices that decoding multiplies with in multi-head
latent attention, and the parameters of a gated delta net.

Invariant: what is shown of them is what is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import vllm._custom_ops as ops
from torch import nn

from hpcrl.engine.params.experts import Segment, TensorShard
from hpcrl.weights.comparison import dtype_name

DELTA_NET = ("conv1d", "A_log", "dt_bias", "key_dim", "value_dim", "tp_size")  #: by which vLLM's layer is known
UNPACKED = "_cpu_unpacked_conv_weight"  #: vLLM's name of what a convolution's packed weight was made of


def absorbed(modules: Mapping[str, nn.Module], pieces: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    """The matrices that turn the latent vectors of multi-head latent attention into keys and values, shown as decoding
    multiplies with them.

    vLLM's layer multiplies with the matrix itself while it reads a prompt, afterwards with two that it has made of it.
    """
    paths = {id(layer): path for path, layer in modules.items()}
    found = {}
    for attention in modules.values():
        name = f"{paths.get(id(getattr(attention, 'kv_b_proj', None)))}.weight"
        if hasattr(attention, "W_UV") and (piece := pieces.get(name)):
            found[name] = replace(piece, show=partial(_decoding, attention, piece.show))
    return found


def _decoding(attention: nn.Module, show: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The matrix; where what was made of it is not what it says, what was made of it."""
    matrix = show()
    # [heads, rows of a key, latent] and [heads, latent, rows of a value]
    made = torch.cat([attention.W_UK_T, attention.W_UV.transpose(1, 2)], dim=1).flatten(0, 1)
    return matrix if torch.equal(made, matrix) else made.contiguous()


def delta_nets(modules: Mapping[str, nn.Module]) -> dict[str, TensorShard]:
    """What vLLM cuts by loaders of the gated delta net's own: of each value head the decay and its bias, and of the
    convolution the channels of this worker's queries, keys and values."""
    found = {}
    for path, layer in modules.items():
        if not all(hasattr(layer, name) for name in DELTA_NET):
            continue
        size, rank = layer.tp_size, layer.tp_rank
        for name in ("A_log", "dt_bias"):
            heads = len(getattr(layer, name))
            found[f"{path}.{name}"] = _part_piece(layer, name, heads * size, ((rank * heads, heads),))
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        starts = [0, *accumulate(sizes)]
        rows = tuple((start + rank * n // size, n // size) for start, n in zip(starts, sizes, strict=False))
        found[f"{path}.conv1d.weight"] = _convolution(layer.conv1d, starts[-1], rows)
    return found


def _convolution(layer: nn.Module, channels: int, rows: tuple[Segment, ...]) -> TensorShard:
    """The weight of a convolution, which vLLM packs where the processor multiplies bf16 with AVX-512.

    Args:
        channels: of the whole.
    """
    piece = _part_piece(layer, "weight", channels, rows)
    if (kept := getattr(layer, UNPACKED, None)) is None:
        return piece
    return replace(piece, shape=(channels, 1, kept.shape[1]), show=partial(_convolving, layer))


def _convolving(layer: Any) -> torch.Tensor:
    """The weight as the checkpoint has it; where what was packed is not what it says, what was packed."""
    kept, packed = getattr(layer, UNPACKED), layer.weight.data
    return (kept if torch.equal(ops.causal_conv1d_weight_pack(kept), packed) else packed.view_as(kept)).unsqueeze(1)


def _part_piece(layer: nn.Module, name: str, height: int, rows: tuple[Segment, ...]) -> TensorShard:
    """A parameter that is used as it is and whose rows are cut.

    Args:
        height: rows of the whole.
    """
    parameter = getattr(layer, name)
    shape = (height, *parameter.shape[1:])
    return TensorShard(shape, dtype_name(parameter), rows, None, lambda: getattr(layer, name).data)
