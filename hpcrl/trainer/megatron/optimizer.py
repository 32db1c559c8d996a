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
from hpcrl.config.rules.schedules import check_schedules, run_steps, schedule_steps, warmup_steps
from hpcrl.trainer.megatron.settings import construct, refusals


def make_optimizer(chunks: list[Any], values: dict[str, Any]) -> MegatronOptimizer:
    """AdamW over the chunks' DDP buffers; norms and biases without weight decay (Megatron-LM's rule)."""
    config = construct(OptimizerConfig, values)
    with refusals("the optimizer"):
        return get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))


def take_step(optimizer: MegatronOptimizer, norm: float) -> bool:
    """Clip the gradients, whose norm over all ranks is `norm`, to --clip-grad and step; False if the optimizer refuses.

    For gradients after `prepare_grads()`: what Megatron's own `step()` does, without preparing and measuring them
    again.
    """
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(leaf, "is_stub_optimizer", False) or leaf.config.clip_grad <= 0:
            continue
        if parameters := leaf.get_parameters():
            decoupled = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, leaf.config.clip_grad, norm, decoupled)
    return optimizer.step_with_ready_grads()


def make_scheduler(optimizer: MegatronOptimizer, options: Options) -> OptimizerParamScheduler:
    """Linear warm-up, then constant or down to --min-lr, over --lr-decay-iters; weight decay constant or growing over
    the whole run, as in Megatron-LM.

    Options that `check_options` has let pass.
    """
    grows = options.weight_decay_incr_style != "constant"
    with refusals("the learning-rate schedule"):
        return OptimizerParamScheduler(
            optimizer,
            init_lr=options.lr_warmup_init,
            max_lr=options.lr,
            min_lr=options.min_lr if options.lr_decay_style != "constant" else 0.0,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.start_weight_decay if grows else options.weight_decay,
            end_wd=options.end_weight_decay if grows else options.weight_decay,
            wd_incr_style=options.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=True,
            wsd_decay_steps=options.lr_wsd_decay_iters,
            lr_wsd_decay_style=options.lr_wsd_decay_style,
            **_lengths(options),
        )


def _lengths(options: Options) -> dict[str, Any]:
    """The scheduler's numbers of steps; of a run whose length is not known yet those that pass until `know_length`."""
    steps = schedule_steps(options) or max(options.lr_warmup_iters + 1, options.lr_wsd_decay_iters or 0)
    return {
        "lr_warmup_steps": warmup_steps(options, steps),
        "lr_decay_steps": steps,
        "wd_incr_steps": run_steps(options) or steps,
    }


def know_length(scheduler: OptimizerParamScheduler, options: Options, rollouts: int) -> None:
    """Give the schedule of a run with --num-epoch its length: so many rollouts, as the prompts turned out to fill.

    One that goes on from a checkpoint has it from there.  UsageError if the parts of the schedule do not fit into it.
    """
    if options.num_rollout is not None or scheduler.num_steps:
        return
    known = options.model_copy(update={"num_rollout": rollouts})
    check_schedules(known)
    scheduler.load_state_dict(scheduler.state_dict() | _lengths(known))
    scheduler.step(0)  # the rates of the first step
