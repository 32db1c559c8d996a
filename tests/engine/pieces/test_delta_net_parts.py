"""What each of two workers needs of a gated delta net: vLLM's own loaders take the same from it as from the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcrl.engine.pieces.part_tensor import part_tensor

pytestmark = pytest.mark.vllm
KEYS, VALUES, HEADS, TAPS = 16, 24, 3, 4  #: of both workers, but for the heads, which each has


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_needs_its_channels_and_heads(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
    from vllm.model_executor.model_loader import weight_utils

    from hpcrl.engine.params.special_layers import delta_nets

    monkeypatch.setattr(weight_utils, "get_tensor_model_parallel_rank", lambda: rank)  # there are no groups here
    layer = nn.Module()
    layer.tp_size, layer.tp_rank, layer.key_dim, layer.value_dim = 2, rank, KEYS, VALUES
    layer.A_log, layer.dt_bias = (nn.Parameter(torch.zeros(HEADS)) for _ in range(2))
    layer.conv1d = nn.Module()
    layer.conv1d.weight = nn.Parameter(torch.zeros(KEYS + VALUES // 2, 1, TAPS))
    heads = weight_utils.sharded_weight_loader(0)
    loaders = {
        "conv1d.weight": mamba_v2_sharded_weight_loader([(KEYS, 0, False)] * 2 + [(VALUES, 0, False)], 2, rank),
        "A_log": heads,
        "dt_bias": heads,
    }
    pieces = delta_nets({"m": layer})
    assert pieces.keys() == {f"m.{name}" for name in loaders}
    for name, load in loaders.items():
        piece, parameter = pieces[f"m.{name}"], layer.get_parameter(name)
        whole = torch.randn(piece.shape)
        load(parameter, whole)
        wanted = parameter.detach().clone()
        parameter.data.zero_()
        part = torch.cat([whole[start : start + length] for start, length in piece.rows])
        load(parameter, part_tensor(whole.shape, part, piece.rows, piece.columns))
        assert torch.equal(parameter, wanted) and torch.equal(piece.show(), part) and wanted.any(), name
