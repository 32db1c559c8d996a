"""The norm over all heads in bf16, bit for bit as engines compute it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def test_it_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 has it (MiniMaxText01RMSNormTP._forward): all in fp32, the weight as well, then one rounding."""
    from megatron.core import parallel_state

    from hpcrl.models.shared._wide_norm import NormOverHeads

    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", 1)
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", 0)
    heads, size = 6, 32
    chance = torch.Generator().manual_seed(0)
    norm = NormOverHeads(SimpleNamespace(params_dtype=torch.bfloat16), size, heads, 1e-6)
    with torch.no_grad():
        norm.weight += torch.randn(heads * size, generator=chance).bfloat16() / 4
        x = torch.randn(9, 2, heads, size, generator=chance).bfloat16()
        flat = x.flatten(2).float()
        r = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-6)
        theirs = (flat * r * norm.weight).to(torch.bfloat16)
        twice = norm.weight * (flat * r).to(torch.bfloat16)
        assert torch.equal(norm(x).flatten(2), theirs)
        assert not torch.equal(twice, theirs)
