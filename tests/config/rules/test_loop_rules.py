"""What the loops go together with, and how old a token may become in each."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options, inert
from hpcrl.errors import UsageError
from hpcrl.trainer.loop_schedule import evaluates_beside, last_evaluation, publishes, settles, steps_of
from tests.support.options import GRPO, SFT

ASYNC = GRPO | {"loop": "async"}
FULLY = GRPO | {"loop": "fully-async"}
#: four optimizer steps of a rollout
STEPS = {"num_steps_per_rollout": 4}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (ASYNC | {"colocate": True}, "--loop async and --colocate exclude each other"),
        (FULLY | {"colocate": True}, "--loop fully-async and --colocate exclude each other"),
        (
            FULLY | {"deterministic_mode": True},
            "when new weights reach",
        ),
        (FULLY | {"keep_old_actor": True}, "--loop fully-async and --keep-old-actor exclude each other"),
        (
            FULLY | {"rollout_function_path": "os.path.join"},
            "--loop fully-async and --rollout-function-path exclude each other",
        ),
        (
            ASYNC | {"max_staleness": 0},
            "--max-staleness 0 is less than the 1 policy versions that --loop async runs ahead",
        ),
        (FULLY | STEPS | {"max_staleness": 3}, "--max-staleness 3 is less than the 4 policy versions"),
        (
            FULLY | {"max_staleness": 1, "update_weights_interval": 2},
            "--max-staleness 1 is less than the 2 policy versions",
        ),
        (
            ASYNC | {"deterministic_mode": True, "update_weights_interval": 2},
            "stopped between two updates",
        ),
        (GRPO | {"update_weights_interval": 2}, "--update-weights-interval has no effect here: --loop is sync"),
        (GRPO | {"max_staleness": 2}, "--max-staleness has no effect here: --loop is sync, and --partial-rollout"),
        (
            FULLY | {"over_sampling_batch_size": 64},
            "--over-sampling-batch-size has no effect here: --loop fully-async issues",
        ),
        (SFT | {"loop": "async"}, "--loop has no effect here: --loss-type sft_loss"),
    ],
)
def test_what_cannot_go_together(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(Options(**values))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (GRPO, 0),
        (GRPO | {"max_staleness": 3}, 0),
        (GRPO | {"partial_rollout": True}, None),
        (GRPO | {"partial_rollout": True, "max_staleness": 3}, 3),
        (ASYNC, 1),
        (ASYNC | STEPS | {"update_weights_interval": 2}, 8),
        (ASYNC | {"partial_rollout": True}, None),
        (ASYNC | {"max_staleness": 5}, 5),
        (FULLY, 2),
        (FULLY | STEPS, 8),
        (FULLY | {"max_staleness": 1}, 1),
    ],
)
def test_how_old_a_token_may_be(values: dict[str, Any], bound: int | None) -> None:
    assert Options(**values).staleness_bound == bound


def test_debug_switch_disables_running_ahead() -> None:
    """A debug switch may be added to any loop; then nothing runs ahead."""
    for more in ({"debug_rollout_only": True}, {"load_debug_rollout_data": "d/{rollout_id}"}):
        options = Options(**(FULLY | more))
        check_options(options)
        assert not options.runs_ahead
    assert "loop" in inert(Options(**(ASYNC | {"num_rollout": 0, "eval_interval": 1})))


def test_when_the_engines_get_new_weights() -> None:
    every = Options(**GRPO)
    assert all(publishes(every, rollout, False) for rollout in range(4)) and not settles(every, True)
    second = Options(**(ASYNC | {"update_weights_interval": 2}))
    assert [publishes(second, rollout, False) for rollout in range(4)] == [False, True, False, True]
    assert publishes(second, 0, True), "what is evaluated are the weights of now"
    assert settles(second, True) and not settles(second, False)
    assert settles(Options(**(ASYNC | {"deterministic_mode": True})), False), (
        "a checkpoint holds what was sampled ahead"
    )
    assert not settles(Options(**FULLY), True), "the weights enter while responses are in flight"


def test_critic_only_rollout_makes_no_version() -> None:
    """A rollout that trains the critic alone makes no policy version."""
    options = Options(**(ASYNC | STEPS | {"advantage_estimator": "ppo", "num_critic_only_steps": 2}))
    assert [steps_of(options, rollout) for rollout in range(4)] == [0, 0, 4, 4]


def test_which_evaluations_are_waited_for() -> None:
    beside = [
        evaluates_beside(Options(**values)) for values in (GRPO, ASYNC, ASYNC | {"deterministic_mode": True}, FULLY)
    ]
    assert beside == [False, True, False, True]
    every = Options(**(FULLY | {"eval_interval": 3}))
    assert [last_evaluation(every, rollout_id, 8) for rollout_id in range(8)] == [-1, -1, 2, 2, 2, 5, 5, 7]
    assert [
        last_evaluation(Options(**(FULLY | {"eval_interval": None})), rollout_id, 3) for rollout_id in range(3)
    ] == [
        -1,
        -1,
        2,
    ]
