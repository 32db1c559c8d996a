"""The trainer looks at the versions of what it consumes, whoever made it; and when it publishes, waits and evaluates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.trainer.loop_schedule import (
    check_staleness,
    evaluates_beside,
    last_evaluation,
    publishes,
    settles,
    steps_of,
)
from hpcrl.transport.share_format import Share
from tests.support.shares import share


def of_versions(version: int, *versions: tuple[int, ...]) -> Share:
    """A share for policy `version`, whose samples' tokens are of `versions`."""
    found = share(answers=tuple(map(len, versions)))
    found.version = version
    found.batch = replace(found.batch, versions=np.asarray([v for one in versions for v in one], np.int32))
    return found


def test_what_is_of_this_policy_is_trained_on() -> None:
    check_staleness(of_versions(4, (4, 4), (4,)), 4)


def test_what_lags_within_the_bound_is_trained_on() -> None:
    check_staleness(of_versions(3, (2, 2), (2, 3)), 4, bound=2)


@pytest.mark.parametrize("wrong", [3, 5])
def test_tokens_outside_the_bound(wrong: int) -> None:
    """A token that is too old or too new is named by sample, versions and bound."""
    old = of_versions(4, (4, 4), (), (4, wrong), (4,))
    with pytest.raises(
        HpcrlError,
        match=rf"rollout 0: sample 2 of group 0 .* versions {min(wrong, 4)} to {max(wrong, 4)}, the trainer is at 4 .* 0 at most",
    ):
        check_staleness(old, 4)


@pytest.mark.parametrize("meant", [3, 5])
def test_batch_for_another_policy(meant: int) -> None:
    """A batch that is meant for another policy is refused."""
    with pytest.raises(HpcrlError, match=f"made for policy version {meant}, the trainer is at 4"):
        check_staleness(of_versions(meant, (4,)), 4)


def test_a_token_beyond_the_bound_is_refused() -> None:
    with pytest.raises(HpcrlError, match="versions 1 to 4, .* lag by 2 at most"):
        check_staleness(of_versions(4, (4,), (1, 4)), 4, bound=2)


LOOPS = [{"loop": "sync"}, {"loop": "async"}, {"loop": "fully-async"}]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_when_weights_are_published(loop: dict[str, str], interval: int) -> None:
    """In sync after every rollout; else after each `interval`-th, counted from the first, and before an evaluation."""
    o = Options(**loop, update_weights_interval=interval)
    for rollout in range(12):
        every = loop["loop"] == "sync" or (rollout + 1) % interval == 0
        assert publishes(o, rollout, False) == every
        assert publishes(o, rollout, True)


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_when_the_next_rollout_is_waited_for(loop: dict[str, str], exact: bool) -> None:
    """In async alone, before new weights; in deterministic mode after every step."""
    o = Options(**loop, deterministic_mode=exact)
    for publishing in (True, False):
        assert settles(o, publishing) == (loop["loop"] == "async" and (publishing or exact))
    assert evaluates_beside(o) == (loop["loop"] != "sync" and not exact)


@pytest.mark.parametrize("interval", [None, 1, 2, 5])
def test_the_last_evaluation_that_was_due(interval: int | None) -> None:
    """The last rollout that ends an interval, or the very last of the run."""
    o = Options(eval_interval=interval)
    for rollout in range(-1, 12):
        due = [r for r in range(rollout + 1) if (interval and (r + 1) % interval == 0) or r + 1 == 12]
        assert last_evaluation(o, rollout, 12) == max(due, default=-1), rollout


def test_a_critic_alone_makes_no_policy_version() -> None:
    """The first rollouts of a critic's run make none; all others one for each optimizer step."""
    o = Options(advantage_estimator="ppo", num_critic_only_steps=3, num_steps_per_rollout=2)
    assert [steps_of(o, rollout) for rollout in range(5)] == [0, 0, 0, 2, 2]
    assert steps_of(Options(num_critic_only_steps=3, num_steps_per_rollout=2), 0) == 2
