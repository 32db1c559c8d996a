"""Megatron's optimizer and learning-rate schedule from the options.

Invariant: the schedule counts optimizer steps: `scheduler.step(1)` after each.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.trainer.megatron.settings import construct, refusals


def make_optimizer(chunks: list[Any], values: dict[str, Any]) -> MegatronOptimizer:
    """AdamW over the chunks' DDP buffers; norms and biases without weight decay (Megatron-LM's rule)."""
    config = construct(OptimizerConfig, values)
    with refusals("the optimizer"):
        return get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))


def take_step(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients, whose norm over all ranks is `norm`, to --clip-grad and step; False if the optimizer refuses.

    For gradients after `prepare_grads()`: what Megatron's own `step()` does, without preparing and measuring them again.
    """
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(leaf, "is_stub_optimizer", False) or leaf.config.clip_grad <= 0:
            continue
        if parameters := leaf.get_parameters():
            decoupled = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, leaf.config.clip_grad, norm, decoupled)
    return optimizer.step_with_ready_grads()


def make_scheduler(optimizer: MegatronOptimizer, options: Options) -> OptimizerParamScheduler:
    """Linear warm-up, then constant or down to --min-lr; weight decay constant or growing, over the same steps.

    UsageError if the numbers contradict one another.
    """
    if options.min_lr > options.lr:
        raise UsageError(f"--min-lr {options.min_lr} is above --lr {options.lr}")
    steps = _decay_steps(options)
    grows = options.weight_decay_incr_style != "constant"
    with refusals("the learning-rate schedule"):
        return OptimizerParamScheduler(
            optimizer,
            init_lr=options.lr_warmup_init,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=_warmup_steps(options, steps),
            lr_decay_steps=steps,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.start_weight_decay if grows else options.weight_decay,
            end_wd=options.end_weight_decay if grows else options.weight_decay,
            wd_incr_steps=steps,
            wd_incr_style=options.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=True,
            wsd_decay_steps=options.lr_wsd_decay_iters,
            lr_wsd_decay_style=options.lr_wsd_decay_style,
        )


def _warmup_steps(options: Options, steps: int) -> float:
    """Steps of warm-up, of the schedule's `steps`; a fraction may give a part of a step, as in Megatron-LM."""
    if options.lr_warmup_fraction is not None:
        return options.lr_warmup_fraction * steps
    if options.lr_warmup_iters >= steps:
        raise UsageError(f"--lr-warmup-iters {options.lr_warmup_iters} is not less than the {steps} steps of the schedule")
    return options.lr_warmup_iters


def _decay_steps(options: Options) -> int:
    """Optimizer steps of the schedule, its decay at the end included."""
    steps = _all_steps(options)
    decay = options.lr_wsd_decay_iters or 0
    if options.lr_decay_style == "WSD" and decay > steps:
        raise UsageError(f"--lr-wsd-decay-iters {decay} is more than the {steps} steps of the schedule")
    return steps


def _all_steps(options: Options) -> int:
    if options.lr_decay_iters is not None:
        return options.lr_decay_iters
    if options.num_rollout is not None:
        return max(options.num_rollout * options.steps_per_rollout, 1)
    if options.lr_decay_style != "constant":
        raise UsageError(f"--lr-decay-style {options.lr_decay_style} without --num-rollout", "give --lr-decay-iters")
    if options.lr_warmup_fraction is not None or options.weight_decay_incr_style != "constant":
        name = "--lr-warmup-fraction" if options.lr_warmup_fraction is not None else "--weight-decay-incr-style"
        raise UsageError(f"{name} without --num-rollout", "give --lr-decay-iters")
    return options.lr_warmup_iters + 1  # its end is never looked at
