"""What a trainer may consume of a group that others made, and what has to be made again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.ledger.group_progress import GroupProgress, fit, mask_older
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED
from tests.support.shares import plain_sample

GROUP = Group(7, Prompt("p", np.zeros(2, np.int32)))


def of(*versions: int, **fields: Any) -> Sample:
    """A sample whose tokens were sampled under these versions."""
    return plain_sample(2, len(versions), versions=np.asarray(versions, np.int32), **fields)


def progress(finished: dict[int, list[Sample]], **fields: Any) -> GroupProgress:
    return GroupProgress(GROUP, finished, **fields)


def test_a_group_is_complete_with_all_that_is_wanted() -> None:
    """All its responses, and the greedy one where it is wanted."""
    half = progress({0: [of(1)]})
    assert half.complete(1, False) and not half.complete(2, False) and not half.complete(1, True)
    assert progress({0: [of(1)]}, baseline=0.0).complete(1, True)
    assert progress({}).empty and not half.empty and not progress({}, partial={0: (of(1),)}).empty


def test_samples_are_in_order_of_index() -> None:
    group = progress({2: [of(3), of(4)], 0: [of(5)]}, partial={1: (of(2, 9, status=ABORTED),)})
    assert [int(sample.array("versions")[0]) for sample in group.samples()] == [5, 3, 4]
    assert [int(sample.array("versions")[0]) for sample in group.all_samples()] == [5, 2, 3, 4]
    assert group.versions() == (2, 9)
    assert progress({0: [of()]}).versions() is None


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 6), st.sampled_from([None, 0, 1, 3]))
def test_a_finished_response_fits_or_is_made_again(versions: list[int], trainer: int, bound: int | None) -> None:
    """It fits where no token is newer than the trainer, or lags by more than the bound."""
    versions = sorted(versions)
    found, lost = fit(progress({0: [of(*versions)], 1: [of(trainer)]}, baseline=0.5), trainer, bound, parts=False)
    good = versions[-1] <= trainer and (bound is None or trainer - versions[0] <= bound)
    assert (set(found.finished), lost) == ({0, 1} if good else {1}, int(not good))
    assert not found.partial
    assert found.baseline == 0.5 if good else math.isnan(found.baseline)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 6), st.sampled_from([None, 0, 1, 3]))
def test_what_later_policies_added_is_cut_off(versions: list[int], trainer: int, bound: int | None) -> None:
    """With partial rollouts the tokens before the first of a later policy stay, unless one of them is too old."""
    versions = sorted(versions)
    kept = [version for version in versions if version <= trainer]
    for group in (
        progress({0: [of(*versions, reward=1.0, response="said")]}),
        progress({}, partial={0: (of(*versions, status=ABORTED),)}),
    ):
        found, lost = fit(group, trainer, bound, parts=True)
        young = bound is None or trainer - versions[0] <= bound
        if len(kept) == len(versions) and young:
            assert lost == 0 and (found.finished == group.finished and found.partial == group.partial)
        elif kept and young:
            (part,) = found.partial[0]
            assert lost == 1 and part.array("versions").tolist() == kept and part.status == ABORTED
            assert (
                part.response_length
                == len(kept)
                == len(part.array("loss_mask"))
                == len(part.array("rollout_log_probs"))
            )
            assert len(part.array("tokens")) == 2 + len(kept) and part.reward is None and part.response == ""
        else:
            assert lost == 1 and not found.partial and not found.finished


def test_only_a_plain_response_is_cut() -> None:
    """One of several samples, or with tokens that are not the policy's, is made again from its start."""
    mask = np.array([1, 0, 1], np.uint8)
    for samples in ([of(1, 1, 9), of(1)], [of(1, 1, 9, loss_mask=mask)]):
        found, lost = fit(progress({0: samples}), 1, None, parts=True)
        assert lost == 1 and found.empty
    (part,) = fit(progress({0: [of(1, 1, 9)]}), 1, None, parts=True)[0].partial[0]
    assert part.array("versions").tolist() == [1, 1]


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_older_tokens_are_masked(version: int) -> None:
    """Those of exactly this version, and of newer ones, are trained as they were."""
    mask = np.array([1, 1, 0, 1], np.uint8)
    before = [of(3, 4, 5, 5, loss_mask=mask), of(5, 5)]
    after = mask_older(before, version)
    assert after[0].array("loss_mask").tolist() == [
        int(m and v >= version) for m, v in zip(mask, (3, 4, 5, 5), strict=True)
    ]
    assert after[1].array("loss_mask").tolist() == [int(version <= 5)] * 2
    assert before[0].array("loss_mask").tolist() == mask.tolist() and after[0].array("loss_mask").dtype == np.uint8
    assert (after[1] is before[1]) == (version <= 5) and after[0].status == COMPLETED
