"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class OptimizerOptions(Base):
    """optimizer (more of Megatron's OptimizerConfig by its own flag names)"""

    lr: float = opt(1e-6, "learning rate (Megatron has no default; slime's is the same)", "megatron", ge=0)
    min_lr: float = opt(0.0, "learning rate at the end of the decay", "megatron", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = opt(
        "constant",
        "schedule after warm-up; WSD: constant, then the decay of --lr-wsd-decay-style (Megatron's default: linear)",
        "megatron",
    )
    lr_warmup_iters: int = opt(0, "optimizer steps of linear warm-up", "megatron", ge=0)
    lr_warmup_fraction: float | None = opt(None, "the same as a part of the schedule's steps", "megatron", ge=0, lt=1)
    lr_warmup_init: float = opt(0.0, "learning rate at the start of the warm-up", "megatron", ge=0)
    lr_decay_iters: int | None = opt(None, "optimizer steps of the schedule; default: all of the run", "megatron", ge=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = opt(
        "exponential", "how WSD decays at its end", "megatron"
    )
    lr_wsd_decay_iters: int | None = opt(None, "optimizer steps of that decay", "megatron", ge=1)
    weight_decay: float = opt(0.0, "weight decay (Megatron's default: 0.01)", "megatron", ge=0)
    start_weight_decay: float | None = opt(None, "weight decay at the start, where it grows", "megatron", ge=0)
    end_weight_decay: float | None = opt(None, "weight decay at the end of the schedule", "megatron", ge=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = opt(
        "constant", "how it grows from --start-weight-decay to --end-weight-decay", "megatron"
    )
    adam_beta1: float = opt(0.9, "Adam's first decay rate", "megatron", ge=0, lt=1)
    adam_beta2: float = opt(0.95, "Adam's second decay rate (Megatron's default: 0.999)", "megatron", ge=0, lt=1)
    adam_eps: float = opt(1e-8, "Adam's epsilon", "megatron", gt=0)
    clip_grad: float = opt(1.0, "clip the gradient to this norm; 0 does not", "megatron", ge=0)
