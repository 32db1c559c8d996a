"""The trainer looks at the versions of what it consumes, whoever made it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpcrl.errors import HpcrlError
from hpcrl.queue.share_format import Share
from hpcrl.trainer.loop_schedule import check_staleness
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
