"""The line in which a trainer says what it runs with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hpcrl.plan import Location, Plan
from hpcrl.trainer.megatron import running_parts
from hpcrl.trainer.megatron.running_parts import differing, exchange_versions, line

EIGHT = {f"node{i}": "2.20.2" for i in range(1, 9)}
ROPE, GROUPED, PERMUTE, ROUTER = "apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"
OFF_ON_CPU = {ROPE: "no CUDA", "gradient_accumulation_fusion": "no CUDA"}


class DistributedOptimizer:
    """As Megatron's, around an optimizer of that name."""

    def __init__(self, module: str, name: str) -> None:
        self.optimizer = type(name, (), {"__module__": module})()


def policy(device: str, impl: str, optimizer: Any, off: dict[str, str], on: str = "", experts: int = 0) -> Any:
    """What the line reads of a policy; its layers add gradients as they compute them where Transformer Engine is."""
    settings = {name: name in on.split() for name in (ROPE, GROUPED, PERMUTE, ROUTER)}
    config = SimpleNamespace(
        transformer_impl=impl,
        num_moe_experts=experts,
        attention_backend=SimpleNamespace(name="auto"),
        params_dtype=torch.float32,
        **settings,
    )
    layer = SimpleNamespace(fuse_wgrad_accumulation=impl == "transformer_engine")
    module = SimpleNamespace(modules=lambda: [layer], decoder=SimpleNamespace(modules=list), output_layer=None)
    ranks = SimpleNamespace(device=torch.device(device), cp_size=1)
    fusions = SimpleNamespace(off=off)
    return SimpleNamespace(config=config, ranks=ranks, modules=[module], fusions=fusions, optimizer=optimizer)


def gpu(impl: str = "transformer_engine") -> Any:
    off = {ROUTER: "--use-routing-replay", "output layer": "it needs Apex"}
    optimizer = DistributedOptimizer("transformer_engine.pytorch", "FusedAdam")
    return policy("cuda", impl, optimizer, off, f"{ROPE} {GROUPED} {PERMUTE}", 8)


def test_the_line_of_a_gpu() -> None:
    assert line(gpu(), EIGHT) == (
        "runs on CUDA: layers Transformer Engine 2.20.2 on all 8 hosts; attention Transformer Engine's, auto; rotary "
        "embedding fused; optimizer transformer_engine's FusedAdam, distributed; grouped GEMM on; permute fusion on; "
        "router fusion off (--use-routing-replay); gradient accumulation fusion on in the layers, not in the output "
        "layer (it needs Apex)"
    )


def test_the_line_of_a_cpu() -> None:
    """Of experts that a model does not have, and of what no CPU could do, nothing is said."""
    found = policy("cpu", "local", DistributedOptimizer("torch.optim", "AdamW"), OFF_ON_CPU)
    assert line(found, {"here": ""}) == (
        "runs on the CPU: layers Megatron-core's own; attention torch's scaled_dot_product_attention; rotary embedding "
        "of hpcrl; optimizer torch's AdamW, distributed; gradient accumulation fusion off"
    )


def without_attention(found: Any, versions: dict[str, str]) -> str:
    """The line, where a GPU would have to be asked for its attention."""
    with mock.patch.object(running_parts, "_attention", return_value="flash-attn"):
        return line(found, versions)


def test_a_gpu_without_transformer_engine_says_so() -> None:
    found = policy("cuda", "local", DistributedOptimizer("torch.optim", "AdamW"), {ROPE: "it is not there"})
    said = without_attention(found, {"here": ""})
    assert "Transformer Engine" in said and "(it is not there)" in said


def test_layers_instead_of_transformer_engine() -> None:
    assert "of Transformer Engine 2.20.2" in without_attention(gpu("local"), {"node1": "2.20.2"})


@pytest.mark.parametrize("other", ["2.19", ""])
def test_hosts_that_differ_are_named(other: str) -> None:
    versions = EIGHT | {"node3": other}
    warning = differing(versions)
    assert f"{other or 'none'} on node3" in warning and "node[1-2,4-8]" in warning
    assert f"{other or 'none'} on node3" in line(gpu(), versions)
    assert not differing(EIGHT)


def test_every_host_is_heard() -> None:
    """Over the store in which the ranks meet, each by its first rank."""
    from torch.distributed import HashStore

    store = HashStore()
    plan = Plan(
        "run", 0, tuple(Location(host, (slot,)) for host in ("a", "b") for slot in (0, 1)), (), Location("a", ())
    )
    for rank in (3, 2, 1):
        assert exchange_versions(store, plan, rank) == {}
    assert exchange_versions(store, plan, 0) == {"a": "", "b": ""}
