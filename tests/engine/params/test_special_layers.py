"""Layers in forms of vLLM's own are shown as the checkpoint has them, and as they are computed with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

CHANNELS, WIDTH = 96, 4


def packed_net() -> Any:
    """A delta net whose convolution is packed, as vLLM does where the processor multiplies bf16 with AVX-512."""
    import vllm._custom_ops as ops

    from hpcrl.engine.params.special_layers import UNPACKED

    plain = torch.randn(CHANNELS, WIDTH).bfloat16()
    packed = torch.nn.Parameter(ops.causal_conv1d_weight_pack(plain), requires_grad=False)
    heads = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    sizes = {"key_dim": 24, "value_dim": 48, "tp_size": 1, "tp_rank": 0}
    return SimpleNamespace(conv1d=SimpleNamespace(weight=packed, **{UNPACKED: plain}), **heads, **sizes)


def test_packed_convolution_is_shown_as_it_was() -> None:
    from hpcrl.engine.params.special_layers import UNPACKED, delta_nets

    net = packed_net()
    piece = delta_nets({"net": net})["net.conv1d.weight"]
    assert (piece.shape, piece.dtype) == ((CHANNELS, 1, WIDTH), "bfloat16")
    assert torch.equal(piece.show(), getattr(net.conv1d, UNPACKED).unsqueeze(1))


def test_a_convolution_packed_of_other_weights_shows() -> None:
    """What an update has left as it was is what decoding multiplies with, so that is what is compared."""
    from hpcrl.engine.params.special_layers import UNPACKED, delta_nets

    net = packed_net()
    piece = delta_nets({"net": net})["net.conv1d.weight"]
    setattr(net.conv1d, UNPACKED, getattr(net.conv1d, UNPACKED) + 1)
    assert piece.show().shape == piece.shape
    assert not torch.equal(piece.show(), getattr(net.conv1d, UNPACKED).unsqueeze(1))
