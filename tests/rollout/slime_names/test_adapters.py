"""slime's filters, hooks and rewards with the run's samples, and slime's `Sample` itself."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpcrl.config.custom_functions import load_object
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_points
from hpcrl.rollout.custom_hooks import RolloutHooks
from hpcrl.rollout.filters.custom_filters import BufferFilter, DynamicFilter
from hpcrl.rollout.grading.grader import grade, load_reward
from hpcrl.rollout.slime_names.adapters import adapted
from hpcrl.rollout.slime_names.conversion import EACH, NotSlimes, from_slime, to_slime
from hpcrl.rollout.slime_names.helpers import compute_pass_rate, compute_statistics, dict_add_prefix
from hpcrl.rollout.slime_names.speakers import speaks_slime
from hpcrl.rollout.slime_names.types import SlimeSample
from hpcrl.sample import COMPLETED, TRUNCATED, Sample

HERE = "tests.support.own_slimes"


def a_sample(reward: float = 1.0, group: int = 0, status: str = COMPLETED, **metadata: Any) -> Sample:
    return Sample(
        group=group,
        index=1,
        tokens=np.arange(5, dtype=np.int32),
        response_length=3,
        loss_mask=np.asarray([1, 0, 1], np.uint8),
        logprobs=np.asarray([-1, 0, -2], np.float32),
        versions=np.asarray([3, 3, 4], np.int32),
        reward=reward,
        status=status,
        prompt="p",
        response="text",
        metadata=metadata,
        rewards={"acc": 0.25},
    )


def test_samples_go_there_and_back() -> None:
    sample = a_sample(label=1)
    options = Options(n_samples_per_prompt=4, reward_key="score")
    there = to_slime(sample, options)
    assert (there.index, there.group_index, there.weight_versions) == (1, 0, ["3", "4"])
    assert there.get_reward_value(options) == 1.0 and there.reward["acc"] == 0.25
    back, given = from_slime(there, sample, options)
    assert given and back.rewards == {"acc": 0.25, "score": 1.0}
    for name in ("tokens", "loss_mask", "logprobs"):
        assert list(getattr(back, name)) == getattr(sample, name).tolist()
    assert (back.reward, back.status, back.metadata, back.response) == (1.0, COMPLETED, {"label": 1}, "text")


def test_columns_are_lists_when_asked_for() -> None:
    """A filter that looks at rewards alone makes none; a list that was asked for is the same one ever after."""
    made = to_slime(a_sample(), Options())
    assert made.reward == 1.0 and not any(map(made.has_list, COLUMNS))
    again, twin = copy.deepcopy(made), copy.copy(made)
    made.tokens.append(9)
    assert made.tokens == [0, 1, 2, 3, 4, 9] and twin.tokens == again.tokens == [0, 1, 2, 3, 4]
    assert [made.has_list(name) for name in COLUMNS] == [True, False, False]
    assert made.to_dict()["rollout_log_probs"] == [-1, 0, -2] and "_columns" not in made.to_dict()
    assert made == SlimeSample.from_dict(made.to_dict()) and not hasattr(made, "nothing")
    sample = a_sample()
    adapted(load_object(f"{HERE}.differs", "--x"), Options(reward_key="score"))(Options(), [sample, a_sample(0.0)])
    assert sample.loss_mask.tolist() == [1, 0, 1], "not asked for, not changed"


COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")


def test_numbers_of_samples_are_their_own() -> None:
    """In an evaluation with more responses to a prompt than in training, too."""
    options = Options(n_samples_per_prompt=2)
    samples = [replace(a_sample(group=group), index=index) for group in range(3) for index in range(4)]
    assert len({to_slime(sample, options).index for sample in samples}) < 12, "of a training rollout there are none"
    token = EACH.set(4)
    assert [to_slime(sample, options).index for sample in samples] == list(range(12))
    EACH.reset(token)


def test_statuses_and_what_is_none_of_slimes() -> None:
    sample, options = a_sample(), Options()
    made = to_slime(sample, options)
    made.status = "truncated"  # as slime's tau-bench example writes it
    assert from_slime(made, sample, options)[0].status == TRUNCATED
    made.status = "done"
    with pytest.raises(NotSlimes, match="status 'done'"):
        from_slime(made, sample, options)
    with pytest.raises(NotSlimes, match="returned a dict"):
        from_slime({}, sample, options)


def test_appended_tokens_stay_aligned() -> None:
    """Sampled tokens need log-probs, those of a tool must have none; lists are grown where they are."""
    sample = SlimeSample(tokens=[1, 2])
    tokens = sample.tokens
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1, -2], text="ab")
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert tokens == [1, 2, 3, 4, 5] and tokens is sample.tokens
    assert (sample.loss_mask, sample.rollout_log_probs, sample.response_length) == ([1, 1, 0], [-1, -2, 0], 3)
    assert sample.effective_response_length == 2
    for wrong in ({"tokens": [1]}, {"tokens": [1], "log_probs": [0, 0]}, {"tokens": [1], "trainable": False} | LOG):
        with pytest.raises(ValueError, match="log_probs"):
            sample.append_response_tokens(**wrong)
    again = SlimeSample.from_dict({**sample.to_dict(), "mine": 1})
    assert again == sample and again.mine == 1  # type: ignore[attr-defined]


LOG: dict[str, Any] = {"log_probs": [0]}


def test_only_what_has_slimes_names_gets_its_samples() -> None:
    ours = load_object("tests.support.own_rewards.length", "--x")
    theirs = load_object(f"{HERE}.reward", "--x")
    assert speaks_slime(theirs) and not speaks_slime(ours)
    assert adapted(ours, Options()) is ours


def test_dynamic_filter_of_slimes() -> None:
    options = Options(dynamic_sampling_filter_path=f"{HERE}.differs", reward_key="score")
    judge = DynamicFilter(options).judge
    assert asyncio.run(judge(0, 0, [a_sample(), a_sample(0.0)])).keep
    assert asyncio.run(judge(0, 0, [a_sample(), a_sample()])).reason == "all_same"


class Waiting:
    """A group in the buffer."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)

    def all_samples(self) -> list[Sample]:
        return self.samples


def test_buffer_filter_of_slimes() -> None:
    """It takes groups out of the buffer that it is given: what it returns is continued, what it drops is dropped."""
    groups = [Waiting(a_sample(group=n, **({"old": True} if n == 1 else {}))) for n in range(4)]
    chosen = BufferFilter(Options(buffer_filter_path=f"{HERE}.newest_first")).choose
    taken, dropped = asyncio.run(chosen(5, groups, 2))  # type: ignore[arg-type]
    assert taken == [groups[3], groups[2]] and dropped == [groups[1]]


def test_what_a_hook_changes_is_changed() -> None:
    hook = adapted(load_object(f"{HERE}.remove_truncated", "--x"), Options())
    whole, cut = a_sample(), a_sample(status=TRUNCATED)
    hook(Options(), [[whole], [cut]])
    assert (whole.remove_sample, cut.remove_sample) == (False, True)
    assert cut.metadata == {"seen": 2}


def hooked(sample: Sample, **values: Any) -> Sample:
    """The sample, changed as `change_all` does for an evaluation."""
    options = Options(rollout_sample_hook_path=[f"{HERE}.{values.pop('hook')}"], **values)
    hooks = RolloutHooks(options, load_points(options, "rollout"))
    asyncio.run(hooks.before_reward(sample, True))
    return sample


def test_a_copy_that_a_hook_returns_is_taken() -> None:
    """And a wrapper that is not async itself is waited for before anything is read back."""
    for hook in ("copied", "limited"):
        sample = hooked(a_sample(), hook=hook)
        assert (sample.reward, sample.remove_sample) == (2.0, True)
        assert sample.loss_mask.tolist() == [1, 1, 1], "a mask of None is all ones"


def test_rewards_that_are_objects_are_edited() -> None:
    """In place too, by the key that holds: --eval-reward-key in evaluations."""
    sample = hooked(
        a_sample(), hook="scored", reward_key="score", eval_reward_key="acc", custom_generate_function_path="x.y"
    )
    assert sample.reward == -5.0 and sample.rewards["acc"] == -5.0
    options, made = Options(reward_key="score"), to_slime(a_sample(), Options())
    made.reward = {"score": -1.0, "acc": 1.0}
    assert from_slime(made, a_sample(), options, "acc")[0].reward == 1.0
    assert from_slime(made, a_sample(), options)[0].reward == -1.0
    with pytest.raises(NotSlimes, match="'other'"):
        from_slime(made, a_sample(), options, "other")


def test_what_is_not_graded_has_no_reward() -> None:
    """NaN, and what a reward is given, is None for slime's."""
    assert to_slime(a_sample(float("nan")), Options()).reward is None
    reward = load_reward(f"{HERE}.sees_none", Options(custom_rm_path=f"{HERE}.sees_none"))
    [found] = asyncio.run(grade([reward], Options(), [a_sample(0.0)], None, 10))
    assert found.values == {f"{HERE}.sees_none": 1.0}


def test_processed_rewards_of_slimes() -> None:
    """What is no sample comes back as it is."""
    centred = adapted(load_object(f"{HERE}.centred", "--x"), Options(reward_key="score"))
    assert centred(Options(), [a_sample(), a_sample(0.0)]) == ([1.0, 0.0], [0.5, -0.5])


def test_numbers_of_metrics() -> None:
    """pass@k by hand: of 4 rewards with 2 right, two drawn hold a right one in 5 of 6 cases."""
    assert compute_pass_rate([1, 1, 0, 0], 4) == pytest.approx({"pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0})
    ragged = compute_pass_rate([1, 0, 0], 2, group_ids=["a", "a", "b"])
    assert ragged == pytest.approx({"pass@1": 0.25, "pass@2": 1.0})
    assert compute_pass_rate([1, 0], 1) == {}
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert dict_add_prefix({"a": 1}, "b/") == {"b/a": 1}


def test_group_rewards_of_slimes() -> None:
    options = Options(custom_rm_path=f"{HERE}.group_reward", group_rm=True, custom={"again": Options(rm_type="exact")})
    group = adapted(load_object(f"{HERE}.group_reward", "--x"), options)
    one, other = a_sample(), a_sample()
    one.label, other.label = "text", "other"
    assert asyncio.run(group(options, [one, other])) == [2.0, 1.0]
