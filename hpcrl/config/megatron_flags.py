"""Megatron's settings that hpcrl does not take, and what those that it takes need: CUDA, and which packages.

What is not taken steers what hpcrl does not have, or does in one way only.  Invariants: each is refused with what to
use instead, or with why there is nothing to set; none is taken and ignored.  Nothing is imported here, torch least of
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_STEPS = "schedules count optimizer steps: use --lr-warmup-iters, --lr-decay-iters and --lr-wsd-decay-iters"
_LENGTH = "use --num-rollout"
_SCHEDULE = "a resumed run continues the schedule of its checkpoint"
_WRAPPER = "the model is wrapped in Megatron's DistributedDataParallel"
_GLOO = "gloo groups are made, because checkpoints need them"
_GARBAGE = "Python's garbage collector is left as it is"

_REASONS: dict[str, str] = {
    _STEPS: "lr_warmup_samples lr_decay_samples lr_wsd_decay_samples",
    _LENGTH: "train_iters train_samples exit_interval exit_duration_in_mins",
    _SCHEDULE: "use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
    _WRAPPER: "use_torch_fsdp2 torch_fsdp2_reshard_after_forward",
    _GLOO: "enable_gloo_process_groups disable_gloo_process_groups use_gloo_process_groups",
    _GARBAGE: "manual_gc manual_gc_interval manual_gc_eval",
    "the model always is Megatron-core's": "use_mcore_models use_legacy_models",
    "Transformer Engine's own choice of buffers is used": "tp_comm_overlap_cfg",
    "use --ddp-bucket-size": "ddp_num_buckets",
    "use --global-batch-size": "rampup_batch_size decrease_batch_size_if_needed",
    "ranks are laid out in Megatron's default order": "use_tp_pp_dp_mapping",
    "times are in the run's metrics": "timing_log_level timing_log_option log_timers_to_tensorboard",
    "memory is left to torch's allocator": "empty_unused_memory_level",
    "weights come from --hf-checkpoint or --load": "data_parallel_random_init init_method_xavier_uniform",
    "use --num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "it is the opposite of --overlap-p2p-comm, which virtual pipeline stages turn on": "batch_p2p_comm",
}

#: argument -> why it cannot be set; the last two are fields that follow from other options
REFUSED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}

#: flags that do not follow from a field's name -> (field, the value they stand for; None: the flag's own value)
IRREGULAR: dict[str, tuple[str, object]] = {
    "grad-reduce-in-bf16": ("grad_reduce_in_fp32", False),
    "recompute-activations": ("recompute_granularity", "selective"),
    "use-flash-attn": ("attention_backend", "flash"),
}

# ---- fields of Megatron-core's configuration classes, which may say what holds anyway

INFERENCE = "it is for inference, which is vLLM's here"
_GRAPH = "packed micro-batches differ in length, so none could replay another's CUDA graph"
_PARAMETERS = "the engines get the weights right after each step, so that there is nothing to overlap with"
_SCALE = "there is no fp16 training"
_BUFFERS = "hpcrl does not set up Transformer Engine's user buffers"
_PLAN = "hpcrl's forward step gives no schedule plan"
_ROWS = "hpcrl runs the output layer itself, for the rows that are trained on and some of them at a time"
_LOGITS = "hpcrl's optimizer step neither clips attention logits nor has them as a metric"
_TOGETHER = {
    INFERENCE: "flash_decode inference_rng_tracker use_inference_optimized_layers inference_fuse_tp_communication "
    "symmetric_ar_type cache_mla_latents mlp_chunks_for_prefill",
    _GRAPH: "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope",
    _PARAMETERS: "overlap_param_gather align_param_gather overlap_param_gather_with_optimizer_step",
    _WRAPPER: "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
    "fsdp_double_buffer init_model_with_meta_device fsdp_manual_registration",
    _SCALE: "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    _BUFFERS: "tp_comm_overlap",
    _ROWS: "defer_embedding_wgrad_compute wgrad_deferral_limit",
    _LOGITS: "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
    _PLAN: "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release",
    "the loss is computed by hpcrl, of the rows that are trained "
    "on": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    "layers that predict further tokens are where the output layer is": "mtp_standalone",
}
#: a setting that is on or differs from its default -> why it has no place here
NEVER: dict[str, str] = {name: why for why, names in _TOGETHER.items() for name in names.split()} | {
    "average_in_collective": "gradients are summed and divided once by what the loss counts",
    "config_logger_dir": "all settings are in the run's options.json",
    "log_num_zeros_in_grad": "it is not a metric of hpcrl's",
    "moe_enable_routing_replay": "give --use-routing-replay or --use-rollout-routing-replay, which also say whose "
    "choice it is",
    "masked_softmax_fusion": "attention is flash or torch's own, whose softmax is fused",
    "mla_down_proj_fusion": "no family has names for the weights of the layer that it makes of two",
    "moe_use_legacy_grouped_gemm": "no family has names for the weights of that layer; --moe-grouped-gemm is "
    "Transformer Engine's",
    "num_distributed_optimizer_instances": "the optimizer's state is spread over all data-parallel ranks",
    "num_microbatches_with_partial_activation_checkpoints": "use --recompute-granularity full with --recompute-method "
    "block",
    "pipeline_model_parallel_comm_backend": "the pipeline's groups are NCCL's with CUDA, else gloo's",
    "test_mode": "it is for Megatron's own tests",
    "use_kitchen": "hpcrl builds no layers of NVIDIA's kitchen",
    "use_ring_exchange_p2p": "no release of torch has ring_exchange",
}


# ---- needed parts

#: what a setting may need besides CUDA -> the packages, one of which must be installed
PARTS: dict[str, tuple[str, ...]] = {
    "Transformer Engine": ("transformer_engine",),
    "flash-attn or Transformer Engine": ("flash_attn", "transformer_engine"),
    "DeepEP": ("deep_ep",),
    "Transformer Engine or Apex": ("transformer_engine", "apex"),
}

_CUDA = """
fp8 fp4 nccl_ub optimizer_cpu_offload overlap_p2p_comm_warmup_flush
pad_buckets_for_high_nccl_busbw use_fused_weighted_squared_relu
"""
_ENGINE = """
apply_query_key_layer_scaling apply_rope_fusion batch_invariant_mode cpu_offloading fine_grained_activation_offloading
fp8_param fp4_param fused_single_qkv_rope memory_efficient_layer_norm moe_grouped_gemm
moe_permute_fusion moe_router_fusion use_precision_aware_optimizer use_te_activation_func use_te_rng_tracker
"""
#: a setting that is on -> the part that it needs ("" is CUDA alone)
NEEDS: dict[str, str] = (
    dict.fromkeys(_CUDA.split(), "")
    | dict.fromkeys(_ENGINE.split(), "Transformer Engine")
    | {
        # layers of Transformer Engine's fuse it themselves, Megatron's own with Apex's kernel
        "gradient_accumulation_fusion": "Transformer Engine or Apex",
        "moe_enable_deepep": "DeepEP",
        "persist_layer_norm": "Transformer Engine",
    }
)
#: a setting with this value -> the part that it needs
VALUE_NEEDS: dict[tuple[str, Any], str] = {
    ("attention_backend", "flash"): "flash-attn or Transformer Engine",
    ("attention_backend", "fused"): "Transformer Engine",
    ("attention_backend", "unfused"): "Transformer Engine",
    ("attention_softmax_in_fp32", False): "Transformer Engine",  # ours always is in fp32
    ("cp_comm_type", "a2a"): "Transformer Engine",
    ("cp_comm_type", "p2p"): "Transformer Engine",
    ("moe_token_dispatcher_type", "flex"): "DeepEP",
    ("transformer_impl", "transformer_engine"): "Transformer Engine",
}


def settings_with_parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(field, value, part) of every setting that needs a part of PARTS; values as a recipe has them."""
    for name, value in settings.items():
        part = (NEEDS.get(name) if value else None) or (
            VALUE_NEEDS.get((name, value)) if isinstance(value, (str, bool)) else None
        )
        if part:
            yield name, value, part
