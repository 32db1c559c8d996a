"""Schedules of translated flags next to Megatron's own scheduler in slime's units: it counts samples there, steps here.

slime makes lr_decay_steps, lr_warmup_steps and the rest of numbers of steps times the global batch size, and moves the
scheduler on by that many samples after each step.
"""

from __future__ import annotations

import itertools
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import resolve_stages
from hpcrl.config.slime.verbatim import PLACES, recipe_of
from hpcrl.errors import UsageError
from tests.config.slime.test_arguments import BASE

pytestmark = pytest.mark.process  # Megatron is imported

BATCH = 256  #: of BASE: 32 prompts x 8 responses, one step a rollout
STEPS = 24
STYLES = {
    "constant": "",
    "linear": "--min-lr 1e-7",
    "cosine": "--min-lr 1e-7",
    "inverse-square-root": "--min-lr 1e-8",
    "WSD": "--min-lr 1e-7 --lr-wsd-decay-iters 6 --lr-wsd-decay-style cosine",
}
WARM = ("", "--lr-warmup-iters 5", "--lr-warmup-fraction 0.25 --lr-warmup-init 1e-8")
DECAY = ("", "--lr-decay-iters 15")


def options_of(more: str) -> Options:
    words = shlex.split(BASE.replace("--num-rollout 3000", f"--num-rollout {STEPS}")) + shlex.split(more)
    return resolve_stages(recipe_of(words, {}), {}, PLACES)[0]


def rates(scheduler: Any, group: dict[str, Any], increment: int) -> list[float]:
    found = []
    for _ in range(STEPS):
        found.append(group["lr"])
        scheduler.step(increment)
    return found


def in_samples(o: Options) -> list[float]:
    """Megatron's, as slime makes it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay = (o.lr_decay_iters or STEPS) * BATCH
    warm = o.lr_warmup_fraction * decay if o.lr_warmup_fraction is not None else o.lr_warmup_iters * BATCH
    group: dict[str, Any] = {"default_config": True, "params": []}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=o.lr_warmup_init,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=warm,
        lr_decay_steps=decay,
        lr_decay_style=o.lr_decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=STEPS * BATCH,
        wd_incr_style="constant",
        wsd_decay_steps=None if o.lr_wsd_decay_iters is None else o.lr_wsd_decay_iters * BATCH,
        lr_wsd_decay_style=o.lr_wsd_decay_style,
    )
    return rates(scheduler, group, BATCH)


@pytest.mark.parametrize(("style", "warm", "decay"), [*itertools.product(STYLES, WARM, DECAY)])
def test_each_rate_is_slimes(style: str, warm: str, decay: str) -> None:
    """Or the schedule is refused: the one whose rates differ."""
    from hpcrl.trainer.megatron.model import make_scheduler

    more = f"--lr-decay-style {style} {STYLES[style]} {warm} {'' if style == 'constant' else decay}"
    if style == "inverse-square-root" and not warm:
        with pytest.raises(UsageError, match="--lr-decay-style inverse-square-root"):
            options_of(more)
        return
    o = options_of(more)
    group: dict[str, Any] = {"default_config": True, "params": []}
    scheduler = make_scheduler(SimpleNamespace(param_groups=[group]), o)  # type: ignore[arg-type]
    assert rates(scheduler, group, 1) == pytest.approx(in_samples(o), rel=1e-12)
