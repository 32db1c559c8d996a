"""The table of experts of DeepEP's rows is Megatron's own, values and gradients."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")

EXPERTS = 5


def megatrons() -> Any:
    """The class as Megatron-core has it, from its own file once more."""
    from hpcrl.trainer.megatron import replaced

    replaced.install()
    spec = importlib.util.find_spec("megatron.core.transformer.moe.token_dispatcher")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._DeepepManager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_of_experts_is_megatrons(dtype: torch.dtype) -> None:
    """Of rows with none, some or all of their choices on this rank."""
    from megatron.core.transformer.moe import token_dispatcher

    from hpcrl.trainer.megatron.replaced import expert_table

    stock = megatrons()
    assert token_dispatcher._DeepepManager._indices_to_multihot is expert_table is not stock._indices_to_multihot
    chance = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(EXPERTS, generator=chance)[:3] for _ in range(40)])
    indices = torch.where(torch.rand(order.shape, generator=chance) < 0.5, -1, order)
    assert (indices < 0).all(1).any() and (indices >= 0).all(1).any()
    weighed = torch.randn(40, EXPERTS, generator=chance)
    found = []
    for function in (stock._indices_to_multihot, expert_table):
        probs = torch.rand(indices.shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        if function is not expert_table:
            table, values = function(SimpleNamespace(num_local_experts=EXPERTS), indices, probs.float())
        else:
            table, values = function(SimpleNamespace(num_local_experts=EXPERTS), indices, probs)
        (values * weighed).sum().backward()
        found.append((table, values, probs.grad))
    for stock_one, ours in zip(*found, strict=True):
        assert ours.dtype == stock_one.dtype and torch.equal(ours, stock_one)
