"""Arguments of Megatron-LM's training script that are no field of Megatron-core's configuration classes.

They steer parts of that script which hpcrl does not have, or does in one way only.  Invariant: each is refused with what
to use instead, or with why there is nothing to set; none is taken and ignored.
"""

from __future__ import annotations

_STEPS = "schedules count optimizer steps: use --lr-warmup-iters, --lr-decay-iters and --lr-wsd-decay-iters"
_LENGTH = "use --num-rollout"
_SCHEDULE = "a resumed run goes on with the schedule of its checkpoint"
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
