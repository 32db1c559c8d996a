"""Megatron's optimizer and learning-rate schedule from the options.

Invariant: the schedule counts optimizer steps: `scheduler.step(1)` after each.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hpcrl.errors import UsageError
from hpcrl.options import Options
from hpcrl.trainer.settings import construct


def make_optimizer(model: Any, values: dict[str, Any]) -> MegatronOptimizer:
    """AdamW over the model's DDP buffers; norms and biases without weight decay (Megatron-LM's rule)."""
    return get_megatron_optimizer(construct(OptimizerConfig, values), [model])


def make_scheduler(optimizer: MegatronOptimizer, options: Options) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then constant, linear or cosine down to --min-lr; constant weight decay.

    UsageError if the numbers contradict one another.
    """
    if options.min_lr > options.lr:
        raise UsageError(f"--min-lr {options.min_lr} is above --lr {options.lr}")
    steps = _decay_steps(options)
    if options.lr_warmup_iters >= steps:
        raise UsageError(f"--lr-warmup-iters {options.lr_warmup_iters} is not less than the {steps} steps of the schedule")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )


def _decay_steps(options: Options) -> int:
    """Optimizer steps of the schedule."""
    if options.lr_decay_iters is not None:
        return options.lr_decay_iters
    if options.num_rollout is not None:
        return max(options.num_rollout * options.steps_per_rollout, 1)
    if options.lr_decay_style == "constant":
        return options.lr_warmup_iters + 1  # its end is never looked at
    raise UsageError(f"--lr-decay-style {options.lr_decay_style} without --num-rollout", "give --lr-decay-iters")
