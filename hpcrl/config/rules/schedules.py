"""The schedules of learning rate and weight decay, counted in optimizer steps: pure functions of the options.

Invariant: whatever `check_schedules` lets pass, Megatron's OptimizerParamScheduler takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.errors import UsageError


def check_schedules(o: Options) -> None:
    """Raise UsageError if the numbers of a schedule contradict one another."""
    if o.lr_warmup_iters and o.lr_warmup_fraction is not None:
        raise UsageError("--lr-warmup-iters and --lr-warmup-fraction exclude each other", "leave one of them out")
    if o.lr_warmup_init > o.lr:
        raise UsageError(f"--lr-warmup-init {o.lr_warmup_init:g} is higher than --lr {o.lr:g}")
    if o.min_lr > o.lr and o.lr_decay_style != "constant":
        raise UsageError(f"--min-lr {o.min_lr:g} is higher than --lr {o.lr:g}")
    if o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters is None:
        raise UsageError("--lr-decay-style WSD needs the length of its decay", "give --lr-wsd-decay-iters")
    _check_weight_decay(o)
    _check_lengths(o)


def _check_weight_decay(o: Options) -> None:
    if o.weight_decay_incr_style == "constant":
        return
    if o.start_weight_decay is None or o.end_weight_decay is None:
        raise UsageError(
            f"--weight-decay-incr-style {o.weight_decay_incr_style} needs both ends",
            "give --start-weight-decay and --end-weight-decay",
        )
    if o.start_weight_decay > o.end_weight_decay:
        raise UsageError(
            f"--start-weight-decay {o.start_weight_decay:g} is higher than --end-weight-decay {o.end_weight_decay:g}"
        )


def _check_lengths(o: Options) -> None:
    steps = schedule_steps(o)
    if steps is None or o.num_rollout == 0:
        return  # --num-epoch: the trainer asks again when the prompts are counted; or nothing is trained
    said = f"the {steps} optimizer steps of the schedule"
    for flag, warmup in (
        ("--lr-warmup-iters", o.lr_warmup_iters),
        ("--critic-lr-warmup-iters", o.critic_lr_warmup_iters),
    ):
        if warmup >= steps:
            raise UsageError(f"{flag} {warmup} is not less than {said}", "they are --lr-decay-iters, or all of the run")
    if o.lr_decay_style == "WSD" and (o.lr_wsd_decay_iters or 0) > steps:
        raise UsageError(
            f"--lr-wsd-decay-iters {o.lr_wsd_decay_iters} is more than {said}", "its decay is the schedule's last part"
        )


def schedule_steps(o: Options) -> int | None:
    """Optimizer steps of the schedule, its decay at the end included; None where the length of the run is not known
    before.

    Where nothing is trained it is as long as its parts ask for.
    """
    if o.lr_decay_iters is not None:
        return o.lr_decay_iters
    if o.num_rollout is None:
        return None
    return o.num_rollout * o.steps_per_rollout or max(o.lr_warmup_iters + 1, o.lr_wsd_decay_iters or 0)


def run_steps(o: Options) -> int | None:
    """Optimizer steps of the whole run; None where its length is not known before, or nothing is trained."""
    return o.num_rollout * o.steps_per_rollout or None if o.num_rollout is not None else None


def warmup_steps(o: Options, steps: int) -> float:
    """Steps of warm-up, of the schedule's `steps`; a fraction may give a part of a step, as in Megatron-LM."""
    return o.lr_warmup_iters if o.lr_warmup_fraction is None else o.lr_warmup_fraction * steps


def inert_in_schedules(o: Options) -> Iterator[tuple[str, str]]:
    """Options of schedules without effect, several in one string -> why."""
    if o.lr_decay_style == "constant":
        fraction = " lr_decay_iters" if o.lr_warmup_fraction is None and o.weight_decay_incr_style == "constant" else ""
        yield "min_lr" + fraction, "--lr-decay-style is constant"
    if o.lr_decay_style != "WSD":
        yield "lr_wsd_decay_style lr_wsd_decay_iters", "--lr-decay-style is not WSD"
    if not o.lr_warmup_iters and not o.lr_warmup_fraction:
        yield "lr_warmup_init", "neither --lr-warmup-iters nor --lr-warmup-fraction is given"
    if o.weight_decay_incr_style == "constant":
        yield "start_weight_decay end_weight_decay", "--weight-decay-incr-style is constant"
    else:
        yield "weight_decay", f"--weight-decay-incr-style is {o.weight_decay_incr_style}"
