"""Which fused kernels a model runs with: by what is installed, what the model is, and what the user says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.errors import UsageError
from hpcrl.trainer.megatron import capabilities
from hpcrl.trainer.megatron.capabilities import GRADIENTS, INTERLEAVED, PERMUTE, ROPE, ROUTER, Machine, rope_kernels
from hpcrl.trainer.megatron.fusions import Fusions, choose_fusions

ALL = frozenset({ROPE, INTERLEAVED, PERMUTE, ROUTER, GRADIENTS})
ENGINE = frozenset({"transformer_engine"})
MOE = {"num_moe_experts": 8}


# ---- stand-ins for Megatron's wrapper and Transformer Engine's kernel, with the signatures of their releases


def wrapper_of_016(t: Any, cu_seqlens: Any, freqs: Any, cp_size: int = 1, cp_rank: int = 0) -> Any: ...


def wrapper_of_019(
    t: Any, cu_seqlens: Any, freqs: Any, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Any: ...


def kernel_of_22(
    t: Any, freqs: Any, tensor_format: str = "sbhd", fused: bool = False, cu_seqlens: Any = None
) -> Any: ...


def kernel_of_220(
    t: Any,
    freqs: Any,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
) -> Any: ...


@pytest.mark.parametrize(
    ("wrapper", "kernel", "found"),
    [
        (None, None, set()),
        (wrapper_of_016, kernel_of_220, {ROPE}),
        (wrapper_of_019, kernel_of_22, {ROPE}),
        (wrapper_of_019, kernel_of_220, {ROPE, INTERLEAVED}),
    ],
)
def test_rotary_kernels_by_signature(wrapper: Any, kernel: Any, found: set[str]) -> None:
    assert rope_kernels(wrapper, kernel) == found


def test_kernels_that_megatron_has_not_found() -> None:
    """Without Transformer Engine and Apex there is none."""
    pytest.importorskip("megatron.core")
    from hpcrl.trainer.megatron import replaced

    replaced.install()
    assert capabilities.find_kernels() == frozenset()


# ---- what is chosen


def machine(found: frozenset[str] = ALL, packages: frozenset[str] = ENGINE, cuda: bool = True) -> Machine:
    return Machine(cuda, packages, found)


@pytest.mark.parametrize("found", [ALL, ALL - {INTERLEAVED}])
def test_rope_of_neighbouring_columns(found: frozenset[str]) -> None:
    """Fused where a kernel rotates them, and where none does a user who asks for it is told."""
    can = INTERLEAVED in found
    model = {"rotary_interleaved": True}
    assert choose_fusions({}, model, machine(found)).settings["apply_rope_fusion"] == can
    assert choose_fusions({}, {}, machine(found)).settings["apply_rope_fusion"]
    if not can:
        with pytest.raises(UsageError, match="this model neighbouring columns"):
            choose_fusions({"apply_rope_fusion": True}, model, machine(found))


#: field -> (kernel, a part of why it is off without)
LACKING = {
    "apply_rope_fusion": (ROPE, "packed sequences"),
    "moe_permute_fusion": (PERMUTE, "Transformer Engine 2.1"),
    "moe_router_fusion": (ROUTER, "Transformer Engine 2.7"),
}


@pytest.mark.parametrize("name", LACKING)
def test_on_wherever_it_can_be(name: str) -> None:
    kernel, why = LACKING[name]
    assert choose_fusions({}, MOE, machine()).settings[name]
    without = machine(ALL - {kernel})
    chosen = choose_fusions({}, MOE, without)
    assert not chosen.settings[name] and why in chosen.off[name]
    with pytest.raises(UsageError, match=why):
        choose_fusions({name: True}, MOE, without)
    asked = choose_fusions({name: False}, MOE, machine())
    assert not asked.settings[name] and name in asked.off


@pytest.mark.parametrize(
    "given", [machine(frozenset(), frozenset()), machine(frozenset(), frozenset(), cuda=False)], ids=["GPU", "CPU"]
)
def test_nothing_is_fused_without_the_packages(given: Machine) -> None:
    chosen = choose_fusions({}, MOE, given)
    assert not any(chosen.settings.values()) and not chosen.layers and not chosen.output
    assert chosen.off.keys() == {*chosen.settings}


def test_a_dense_model_says_nothing_of_experts() -> None:
    assert choose_fusions({}, {}, machine()).settings.keys() == {"apply_rope_fusion", "gradient_accumulation_fusion"}


def test_a_replay_needs_megatrons_router() -> None:
    """The fused one never asks whose choice is replayed; the permutation does not care."""
    chosen = choose_fusions({}, MOE, machine(), "--use-routing-replay")
    assert chosen.settings["moe_permute_fusion"] and not chosen.settings["moe_router_fusion"]
    with pytest.raises(UsageError, match="--use-routing-replay"):
        choose_fusions({"moe_router_fusion": True}, MOE, machine(), "--use-routing-replay")


def test_a_correction_bias_needs_megatrons_router() -> None:
    """Whose fused one would lose small scores; a user who asks for it is told."""
    model = MOE | {"moe_router_enable_expert_bias": True}
    chosen = choose_fusions({}, model, machine())
    assert chosen.settings["moe_permute_fusion"] and not chosen.settings["moe_router_fusion"]
    with pytest.raises(UsageError, match="correction bias"):
        choose_fusions({"moe_router_fusion": True}, model, machine())


@pytest.mark.parametrize(
    "given",
    [
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": ["none", "quantile_balancing"]},
        {"moe_router_dtype": "fp64"},
    ],
)
def test_routers_that_have_no_fused_kernel(given: dict[str, Any]) -> None:
    assert not choose_fusions(given, MOE, machine()).settings["moe_router_fusion"]


# ---- weight gradients

NO_APEX = ALL - {GRADIENTS}
LOCAL = {"transformer_impl": "local"}
OVERLAP = {"overlap_grad_reduce": True}
#: (kernels, packages, the user's settings, --log-probs-chunk-size) -> in the layers, in the output layer
WHOSE: list[tuple[frozenset[str], frozenset[str], dict[str, Any], bool, tuple[bool, bool]]] = [
    (ALL, ENGINE, {}, True, (True, True)),
    (NO_APEX, ENGINE, {}, True, (True, False)),
    (NO_APEX, ENGINE, {"gradient_accumulation_fusion": True}, True, (True, False)),
    (NO_APEX, ENGINE, LOCAL, True, (False, False)),
    (frozenset({GRADIENTS}), frozenset({"apex"}), {}, True, (True, True)),
    (ALL, ENGINE, {"gradient_accumulation_fusion": False}, True, (False, False)),
    (ALL, ENGINE, OVERLAP, True, (True, False)),
    (ALL, ENGINE, OVERLAP, False, (True, True)),
]


@pytest.mark.parametrize(("found", "packages", "given", "in_pieces", "whose"), WHOSE)
def test_whose_gradients(
    found: frozenset[str], packages: frozenset[str], given: dict[str, Any], in_pieces: bool, whose: tuple[bool, bool]
) -> None:
    """Without Apex those of Transformer Engine's layers; Megatron's own refuse to be built with it then."""
    chosen = choose_fusions(given, {}, machine(found, packages), in_pieces=in_pieces)
    assert (chosen.layers, chosen.output) == whose
    assert chosen.settings["gradient_accumulation_fusion"] == (whose[0] and GRADIENTS in found)


def test_gradients_of_own_layers_need_apex() -> None:
    with pytest.raises(UsageError, match="--gradient-accumulation-fusion.*Apex"):
        choose_fusions({"gradient_accumulation_fusion": True, **LOCAL}, {}, machine(NO_APEX))


def test_layers_are_told() -> None:
    """Transformer Engine's read their own attribute, the output layer Megatron's."""
    import torch

    layer = torch.nn.Linear(1, 1)
    layer.fuse_wgrad_accumulation = False
    model = torch.nn.Module()
    model.layer, model.output_layer = layer, torch.nn.Linear(1, 1)
    model.output_layer.gradient_accumulation_fusion = True
    Fusions(layers=True, output=False).apply(model)
    assert layer.fuse_wgrad_accumulation and not model.output_layer.gradient_accumulation_fusion
    value_head = SimpleNamespace(modules=list, output_layer=torch.nn.Linear(1, 1))
    Fusions(layers=True, output=True).apply(value_head)
    assert not hasattr(value_head.output_layer, "gradient_accumulation_fusion")
