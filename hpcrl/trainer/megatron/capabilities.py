"""Settings of Megatron-core that this machine cannot honour, or that nothing here would read.

Megatron notices some of them when the model is built, some at the first step, and some never: the run would go on
without what was asked for.  Invariant: a setting that passes `check` has its effect.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hpcrl.config.passthrough import as_flag
from hpcrl.config.rules.passed_through_rules import check_megatron
from hpcrl.errors import UsageError
from hpcrl.trainer.megatron.needed_parts import NEEDS, PARTS, VALUE_NEEDS


@dataclass(frozen=True)
class Machine:
    """What settings ask of a machine: CUDA, and packages of PARTS."""

    cuda: bool
    packages: frozenset[str]

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        known = {package for packages in PARTS.values() for package in packages}
        return cls(torch.cuda.is_available(), frozenset(name for name in known if importlib.util.find_spec(name)))

    def has(self, part: str) -> bool:
        """Whether there is CUDA, and the part ("": CUDA alone)."""
        return self.cuda and (not part or not self.packages.isdisjoint(PARTS[part]))

    @property
    def engine(self) -> bool:
        """Whether layers are built from Transformer Engine: where there is CUDA and it is installed."""
        return self.has("Transformer Engine")


_INFERENCE = "it is for inference, which is vLLM's here"
_GRAPH = "packed micro-batches differ in length, so none could replay another's CUDA graph"
_PARAMETERS = "the engines get the weights right after each step, so that there is nothing to overlap with"
_WRAPPER = "the model is wrapped in Megatron's DistributedDataParallel"
_SCALE = "there is no fp16 training"
_BUFFERS = "hpcrl does not set up Transformer Engine's user buffers"
_PLAN = "hpcrl's forward step gives no schedule plan"
_ROWS = "hpcrl runs the output layer itself, for the rows that are trained on and some of them at a time"
_TOGETHER = {
    _INFERENCE: "flash_decode inference_rng_tracker use_inference_optimized_layers inference_fuse_tp_communication symmetric_ar_type "
    "cache_mla_latents mlp_chunks_for_prefill",
    _GRAPH: "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope",
    _PARAMETERS: "overlap_param_gather align_param_gather overlap_param_gather_with_optimizer_step",
    _WRAPPER: "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer "
    "init_model_with_meta_device fsdp_manual_registration",
    _SCALE: "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    _BUFFERS: "tp_comm_overlap",
    _ROWS: "defer_embedding_wgrad_compute wgrad_deferral_limit",
    _PLAN: "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release",
    "the loss is computed by hpcrl, of the rows that are trained on": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    "multi-token prediction is not trained": "mtp_standalone",
}
#: a setting that is on or differs from its default -> why it has no place here
NEVER: dict[str, str] = {name: why for why, names in _TOGETHER.items() for name in names.split()} | {
    "average_in_collective": "gradients are summed and divided once by what the loss counts",
    "config_logger_dir": "all settings are in the run's options.json",
    "log_num_zeros_in_grad": "it is no metric of hpcrl's",
    "moe_enable_routing_replay": "give --use-routing-replay or --use-rollout-routing-replay, which also say whose choice it is",
    "masked_softmax_fusion": "attention is flash or torch's own, whose softmax is fused",
    "moe_use_legacy_grouped_gemm": "no family has names for the weights of that layer; --moe-grouped-gemm is Transformer Engine's",
    "num_distributed_optimizer_instances": "the optimizer's state is spread over all data-parallel ranks",
    "num_microbatches_with_partial_activation_checkpoints": "use --recompute-granularity full with --recompute-method block",
    "pipeline_model_parallel_comm_backend": "the pipeline's groups are NCCL's with CUDA, else gloo's",
    "test_mode": "it is for Megatron's own tests",
    "use_kitchen": "hpcrl builds no layers of NVIDIA's kitchen",
    "use_ring_exchange_p2p": "no release of torch has ring_exchange",
}
#: what makes another model than config.json says, beside what `hpcrl.models.model_args` compares with it
ARCHITECTURE = {
    "apply_residual_connection_post_layernorm",
    "is_hybrid_model",
    "linear_attention_freq",
    "mrope_section",
    "window_attn_skip_freq",
}


def check_capabilities(given: Mapping[str, Any], defaults: Mapping[str, Any], machine: Machine) -> None:
    """UsageError for the first of the user's settings that cannot have its effect on `machine`.

    given: the user's settings that config.json does not decide, by field, in the types of their fields; defaults: the
    default of every field.
    """
    for name, value in given.items():
        if name in ARCHITECTURE and value != defaults[name]:
            raise UsageError(f"{as_flag(name, value)}: the model's config.json does not say so", "leave the flag out")
        if name in NEVER and value not in (None, False) and value != defaults[name]:
            _refuse(name, value, NEVER[name])
        if value and name in NEEDS:
            _need(machine, name, value, NEEDS[name])
        plain = getattr(value, "name", value)  # of an enum
        if isinstance(plain, (str, bool)) and (part := VALUE_NEEDS.get((name, plain))):
            _need(machine, name, value, part)
    check_megatron({name: getattr(value, "name", value) for name, value in given.items()})
    _combinations(given, machine)


def rope_fusion(given: Mapping[str, Any], model: Mapping[str, Any], machine: Machine) -> bool:
    """Whether the rotary embedding is fused where the user does not say.

    Megatron's fused kernel for packed sequences rotates the two halves of a head, and leaves unread that a model rotates
    neighbouring columns: UsageError if the user asks for it there.
    """
    interleaved = bool(model.get("rotary_interleaved"))
    if interleaved and given.get("apply_rope_fusion"):
        _refuse("apply_rope_fusion", True, "for packed sequences it rotates halves of a head, this model neighbouring columns")
    return machine.engine and not interleaved


def check_replay(given: Mapping[str, Any], flag: str) -> None:
    """UsageError if the user's settings have a router that does not ask whose choice of experts is replayed; flag: for which."""
    if given.get("moe_router_fusion"):
        _refuse("moe_router_fusion", True, f"Transformer Engine's fused router replays no choice of experts, as {flag} wants")
    kinds = given.get("moe_router_load_balancing_type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind in ("sinkhorn", "quantile_balancing"):
            _refuse("moe_router_load_balancing_type", kind, f"that router replays no choice of experts, as {flag} wants")


def _combinations(given: Mapping[str, Any], machine: Machine) -> None:
    if getattr(given.get("attention_backend"), "name", "") == "local":
        _refuse("attention_backend", "local", "Megatron's own attention takes no packed sequences")
    if given.get("transformer_impl") == "inference_optimized":
        _refuse("transformer_impl", "inference_optimized", _INFERENCE)
    if given.get("transformer_impl") == "local" and given.get("moe_grouped_gemm"):
        _refuse("moe_grouped_gemm", True, "it is Transformer Engine's, which --transformer-impl local leaves out")
    if given.get("cp_comm_type") not in (None, "all_gather"):
        _need(machine, "cp_comm_type", given["cp_comm_type"], "Transformer Engine")
    if "layernorm" in (given.get("recompute_modules") or ()):
        _need(machine, "recompute_modules", "layernorm", "Transformer Engine")


def _need(machine: Machine, name: str, value: Any, part: str) -> None:
    if not machine.cuda:
        also = f" and {part}" if part else ""
        raise UsageError(f"{as_flag(name, value)} cannot be done without CUDA{also}", "leave it out on a CPU")
    if not machine.has(part):
        raise UsageError(f"{as_flag(name, value)} needs {part}, which is not installed here", "install it, or leave the flag out")


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise UsageError(f"{as_flag(name, value)} cannot be set: {why}", "leave it out")
