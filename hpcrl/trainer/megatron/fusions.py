"""Which fused kernels a model runs with: those that are installed, where they compute what hpcrl needs.

Each is on where the user says nothing and it can be, off with a reason where it cannot; a user's own flag wins, and is
refused if it could have no effect or a wrong one.

Weight gradients may be added to Megatron's gradient buffer by the GEMM that computes them: Transformer Engine's layers
do that themselves, Megatron's own, the output layer always among them, call Apex's kernel.  What follows is the same
either way, in fp32 and bf16 buffers: the loss's scale is in what flows back, DistributedDataParallel adds only what is
not added yet (`grad_added_to_main_grad`), and of a weight that is embedding and output layer in one the embedding's
part alone (`zero_out_wgrad`, which LanguageModule sets).  tests/trainer/step/test_fused_gradients.py compares it.

Invariant: no fusion is on that leaves unread what the model or the run asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcrl.config.passthrough import as_flag
from hpcrl.errors import UsageError
from hpcrl.trainer.megatron import capabilities
from hpcrl.trainer.megatron.capabilities import Machine

NO_CUDA = "no CUDA"
NO_ENGINE = "Transformer Engine is not installed"
#: routers that never call the fused kernel: transformer/moe/router.py (`sinkhorn_load_balancing`), and of 0.19.2
#: `quantile_balancing`, which asserts that it is off
OWN_CHOICE = ("sinkhorn", "quantile_balancing")
ROPE = "apply_rope_fusion"
PERMUTE = "moe_permute_fusion"
ROUTER = "moe_router_fusion"
GRADIENTS = "gradient_accumulation_fusion"


@dataclass(frozen=True)
class Fusions:
    """What is fused.

    Attributes:
        settings: fields of TransformerConfig.
        layers, output: whether the transformer layers', and the output layer's, weight gradients are added to the
            buffer as they are computed.
        off: field -> why it is off, of those that could have been on; "output layer" -> why its gradients are not.
    """

    settings: Mapping[str, bool] = field(default_factory=dict)
    layers: bool = False
    output: bool = False
    off: Mapping[str, str] = field(default_factory=dict)

    def apply(self, module: torch.nn.Module) -> None:
        """Let the layers of a trained model accumulate weight gradients in its buffers, as the settings say."""
        for part in module.modules():
            if hasattr(part, "fuse_wgrad_accumulation"):  # of Transformer Engine's layers, which read it in each pass
                part.fuse_wgrad_accumulation = self.layers
        output = getattr(module, "output_layer", None)
        if hasattr(output, GRADIENTS):
            output.gradient_accumulation_fusion = self.output  # type: ignore[union-attr]


NOTHING = Fusions()


def choose_fusions(
    given: Mapping[str, Any],
    model: Mapping[str, Any],
    machine: Machine,
    replay: str = "",
    in_pieces: bool = True,
) -> Fusions:
    """What is fused on `machine`.

    Args:
        given: the user's settings, by field.
        model: TransformerConfig fields from config.json.
        replay: the flag by which choices of experts are replayed, "" for none.
        in_pieces: whether log-probs are computed of some rows at a time (--log-probs-chunk-size).

    Raises:
        UsageError: for a setting of the user's that lacks what it needs.
    """
    why = {ROPE: _no_rope(model, machine)}
    if model.get("num_moe_experts"):
        why[PERMUTE] = _no_kernel(machine, capabilities.PERMUTE, "Transformer Engine 2.1 or later has it")
        why[ROUTER] = _no_router(given, bool(model.get("moe_router_enable_expert_bias")), machine, replay)
    local = given.get("transformer_impl") == "local" or not machine.engine
    why[GRADIENTS] = _no_gradients(machine, local)
    off = {}
    for name, reason in why.items():
        if given.get(name) and reason:
            raise UsageError(f"{as_flag(name, True)} cannot be set: {reason}", "leave it out")
        if reason or given.get(name) is False:
            off[name] = reason or as_flag(name, False)
    fused = GRADIENTS not in off
    of_output = _no_output_gradients(given, machine, in_pieces)
    if fused and of_output:
        off["output layer"] = of_output
    settings = {name: name not in off for name in why}
    # Megatron's ColumnParallelLinear refuses it without Apex, with any other layers: `apply` says later
    settings[GRADIENTS] = fused and capabilities.GRADIENTS in machine.kernels
    return Fusions(settings, layers=fused, output=fused and not of_output, off=off)


def _no_rope(model: Mapping[str, Any], machine: Machine) -> str:
    if model.get("multi_latent_attention"):
        return (
            "Megatron-core's kernel for multi-head latent attention rotates with YaRN alone, and was compared with "
            "nothing here"
        )
    if reason := _no_kernel(machine, capabilities.ROPE, "for packed sequences it has no rotary embedding"):
        return reason
    if model.get("rotary_interleaved") and capabilities.INTERLEAVED not in machine.kernels:
        return (
            "for packed sequences Megatron-core's kernel rotates halves of a head, this model neighbouring columns "
            "(Megatron-core 0.19 with Transformer Engine 2.3 can)"
        )
    return ""


def _no_router(given: Mapping[str, Any], biased: bool, machine: Machine, replay: str) -> str:
    # the kernel (fused_topk_with_score_function, in all versions so far) adds the bias to the scores, chooses, and
    # takes it off again: of a score of 1e-8 and a bias of 12, nothing is left in fp32.  test_router_fusion.py shows it.
    if biased:
        return (
            "Transformer Engine's fused router takes the probabilities of experts from their scores with the model's "
            "correction bias, in which those much smaller than the bias are lost"
        )
    # with `fused`, topk_routing_with_score_function returns before it asks its RouterReplay
    if replay:
        return f"Transformer Engine's fused router replays no choice of experts, as {replay} wants"
    if given.get("moe_router_dtype") == "fp64":
        return "Transformer Engine's fused router takes no fp64, as --moe-router-dtype wants"
    if own := _own_choice(given):
        return f"{own} has a router of its own"
    return _no_kernel(machine, capabilities.ROUTER, "Transformer Engine 2.7 or later has it")


def _no_kernel(machine: Machine, kernel: str, otherwise: str) -> str:
    if not machine.cuda:
        return NO_CUDA
    if not machine.engine:
        return NO_ENGINE
    return "" if kernel in machine.kernels else otherwise


def _no_gradients(machine: Machine, local: bool) -> str:
    """Why the layers' are not added as they are computed."""
    if not machine.cuda:
        return NO_CUDA
    if local and capabilities.GRADIENTS not in machine.kernels:
        return "Megatron's own layers need Apex with its CUDA extensions for it, which is not installed"
    return ""


def _no_output_gradients(given: Mapping[str, Any], machine: Machine, in_pieces: bool) -> str:
    if capabilities.GRADIENTS not in machine.kernels:
        return "it needs Apex"
    # torch's checkpoint, under which the pieces are computed, gives the backward pass another tensor of the weight's
    # memory, without Megatron's marks; no gradient then arrives at the weight, which DistributedDataParallel takes for
    # an error where it counts them to overlap the reduction
    if in_pieces and given.get("overlap_grad_reduce"):
        return "with --overlap-grad-reduce it needs --log-probs-chunk-size -1"
    return ""


def check_replay(given: Mapping[str, Any], flag: str) -> None:
    """Raise UsageError if the user's settings have a router that does not ask whose choice of experts is replayed.

    Args:
        flag: for which.
    """
    if own := _own_choice(given):
        raise UsageError(
            f"{own} cannot be set: that router replays no choice of experts, as {flag} wants",
            "leave it out",
        )


def _own_choice(given: Mapping[str, Any]) -> str:
    """The flag of a router that chooses experts by itself, "" for none."""
    kinds = given.get("moe_router_load_balancing_type")
    own = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in OWN_CHOICE]
    return as_flag("moe_router_load_balancing_type", own[0]) if own else ""
