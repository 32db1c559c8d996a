"""The line in which a trainer says what it runs with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.plan import Location, Plan
from hpcrl.trainer.megatron.running_parts import RunningParts, differing, exchange_versions, line

EIGHT = {f"node{i}": "2.20.2" for i in range(1, 9)}
GPU = RunningParts(
    device="CUDA",
    engine=True,
    attention="Transformer Engine's, auto",
    rope=True,
    optimizer="transformer_engine's FusedAdam, distributed",
    experts=True,
    grouped=True,
    permute=True,
    router=False,
    gradients=("layers",),
    off={"moe_router_fusion": "--use-routing-replay", "output layer": "it needs Apex"},
    versions=EIGHT,
)
CPU = RunningParts(
    device="the CPU",
    engine=False,
    attention="torch's scaled_dot_product_attention",
    rope=False,
    optimizer="torch's AdamW, distributed",
    experts=False,
    grouped=False,
    permute=False,
    router=False,
    gradients=(),
    off={"apply_rope_fusion": "no CUDA", "gradient_accumulation_fusion": "no CUDA"},
    versions={"here": ""},
)


def test_the_line_of_a_gpu() -> None:
    said = line(GPU)
    assert said == (
        "runs on CUDA: layers Transformer Engine 2.20.2 on all 8 hosts; attention Transformer Engine's, auto; rotary "
        "embedding fused; optimizer transformer_engine's FusedAdam, distributed; grouped GEMM on; permute fusion on; "
        "router fusion off (--use-routing-replay); gradient accumulation fusion on in the layers, not in the output "
        "layer (it needs Apex)"
    )


def test_the_line_of_a_cpu() -> None:
    """Of experts that a model does not have, and of what no CPU could do, nothing is said."""
    assert line(CPU) == (
        "runs on the CPU: layers Megatron-core's own; attention torch's scaled_dot_product_attention; rotary embedding "
        "of hpcrl; optimizer torch's AdamW, distributed; gradient accumulation fusion off"
    )


def test_a_gpu_without_transformer_engine_says_so() -> None:
    said = line(replace(CPU, device="CUDA", off={"apply_rope_fusion": "it is not there"}))
    assert "Transformer Engine" in said and "(it is not there)" in said


def test_layers_instead_of_transformer_engine() -> None:
    assert "of Transformer Engine 2.20.2" in line(replace(GPU, engine=False, versions={"node1": "2.20.2"}))


@pytest.mark.parametrize("other", ["2.19", ""])
def test_hosts_that_differ_are_named(other: str) -> None:
    versions = EIGHT | {"node3": other}
    warning = differing(versions)
    assert f"{other or 'none'} on node3" in warning and "node[1-2,4-8]" in warning
    assert f"{other or 'none'} on node3" in line(replace(GPU, versions=versions))
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
