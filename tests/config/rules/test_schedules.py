"""How long the schedules are, and what contradicts itself in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config.options import Options
from hpcrl.config.rules.schedules import check_schedules, run_steps, schedule_steps, warmup_steps
from hpcrl.errors import UsageError


@given(st.integers(0, 50), st.integers(1, 4), st.integers(0, 9), st.sampled_from([None, 7, 400]))
def test_a_schedule_counts_optimizer_steps(rollouts: int, steps: int, warmup: int, decay: int | None) -> None:
    """--lr-decay-iters, or all steps of the run; where nothing is trained, as long as its parts ask for."""
    o = Options(num_rollout=rollouts, num_steps_per_rollout=steps, lr_warmup_iters=warmup, lr_decay_iters=decay)
    assert schedule_steps(o) == (decay if decay is not None else rollouts * steps or warmup + 1)
    assert run_steps(o) == (rollouts * steps or None)


def test_a_run_of_unknown_length() -> None:
    """With --num-epoch it is not known before the prompts are counted."""
    o = Options(num_epoch=2, num_rollout=None)
    assert schedule_steps(o) is None and run_steps(o) is None
    assert schedule_steps(Options(num_rollout=None, lr_decay_iters=9)) == 9


def test_warm_up_in_steps_or_as_a_share() -> None:
    assert warmup_steps(Options(lr_warmup_iters=3), 40) == 3
    assert warmup_steps(Options(lr_warmup_fraction=0.1), 40) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"lr_warmup_iters": 10}, "--lr-warmup-iters 10"),
        ({"critic_lr_warmup_iters": 10}, "--critic-lr-warmup-iters 10"),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "--lr-warmup-fraction"),
        ({"lr_warmup_init": 1e-2, "lr_warmup_iters": 1}, "--lr-warmup-init"),
        ({"min_lr": 1e-2, "lr_decay_style": "cosine"}, "--min-lr"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}, "--lr-wsd-decay-iters 11"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "--start-weight-decay"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start-weight-decay 0.2",
        ),
    ],
    ids=str,
)
def test_schedules_that_contradict_themselves(given: dict[str, Any], flag: str) -> None:
    """Of a run of ten optimizer steps at a rate of 1e-3."""
    with pytest.raises(UsageError, match=flag):
        check_schedules(Options(**({"num_rollout": 10, "num_steps_per_rollout": 1, "lr": 1e-3} | given)))


@pytest.mark.parametrize(
    "given",
    [
        {"lr_warmup_iters": 9},
        {"critic_lr_warmup_iters": 9},
        {"lr_warmup_init": 1e-3, "lr_warmup_iters": 1},
        {"min_lr": 1e-3, "lr_decay_style": "cosine"},
        {"min_lr": 1e-2},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 10},
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.1},
        {"lr_warmup_iters": 90, "num_rollout": 0},
        {"lr_warmup_iters": 90, "num_rollout": None, "num_epoch": 1},
    ],
    ids=str,
)
def test_schedules_at_their_limits_pass(given: dict[str, Any]) -> None:
    check_schedules(Options(**({"num_rollout": 10, "num_steps_per_rollout": 1, "lr": 1e-3} | given)))
