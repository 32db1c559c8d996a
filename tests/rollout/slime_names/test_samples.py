"""slime's filters, hooks and rewards with the run's samples, and `Sample` as slime's functions use it."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

from hpcrl.config.custom_functions import load_object
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_points
from hpcrl.rollout.custom_hooks import RolloutHooks
from hpcrl.rollout.filters.custom_filters import BufferFilter, DynamicFilter
from hpcrl.rollout.grading import grader
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.rollout.slime_names.helpers import compute_pass_rate, compute_statistics, dict_add_prefix
from hpcrl.rollout.worker_messages import pack, unpack
from hpcrl.sample import BadSample, Sample
from hpcrl.utils.sample_parts import COMPLETED, TRUNCATED, SampleStatus
from tests.support.asked_samples import args_of

HERE = "tests.support.own_slimes"


def a_sample(reward: float | None = 1.0, group: int = 0, status: SampleStatus = COMPLETED, **metadata: Any) -> Sample:
    return Sample(
        group_index=group,
        response_index=1,
        tokens=np.arange(5, dtype=np.int32),
        response_length=3,
        loss_mask=np.asarray([1, 0, 1], np.uint8),
        rollout_log_probs=np.asarray([-1, 0, -2], np.float32),
        versions=np.asarray([3, 3, 4], np.int32),
        reward=reward,
        status=status,
        prompt="p",
        response="text",
        metadata=metadata,
        rewards={"acc": 0.25},
    )


def test_a_sample_is_read_as_slimes() -> None:
    sample = a_sample(group=2, label=1).replace(group_size=4, reward_key="score")
    assert (sample.index, sample.group_index, sample.weight_versions) == (9, 2, ["3", "4"])
    assert sample.get_reward_value(Options(reward_key="score")) == 1.0 == sample.score and sample.reward["acc"] == 0.25
    sample.reward["acc"] = 0.5
    again = unpack(pack(sample))
    assert again.rewards == {"acc": 0.5, "score": 1.0} and again.reward == sample.reward
    sample.reward = {"acc": 1.0}
    with pytest.raises(BadSample, match="'score' is not"):
        sample.check()


def test_columns_are_lists_when_asked_for() -> None:
    """A filter that looks at rewards alone makes none; a list that was asked for is the same one until the sample is
    checked, and what was appended to it is the sample's."""
    made = a_sample()
    held = lambda name: type(vars(made)[f"_{name}"])  # noqa: E731
    assert made.reward == 1.0 and made.effective_response_length == 2
    assert made.columns() and {held(name) for name in COLUMNS} == {np.ndarray}
    again, twin = copy.deepcopy(made), copy.copy(made)
    tokens = made.tokens
    tokens.append(9)
    assert made.tokens is tokens == [0, 1, 2, 3, 4, 9] and twin.tokens == again.tokens == [0, 1, 2, 3, 4]
    assert [held(name) for name in COLUMNS] == [list, np.ndarray, np.ndarray]
    made.check()
    assert made.array("tokens").tolist() == [0, 1, 2, 3, 4, 9] and held("tokens") is np.ndarray
    assert made.to_dict()["rollout_log_probs"] == [-1, 0, -2] and "_tokens" not in made.to_dict()
    assert made == Sample.from_dict(made.to_dict()) and not hasattr(made, "nothing")
    made = a_sample()
    call(f"{HERE}.differs", [made, a_sample(0.0)])
    assert {held(name) for name in COLUMNS} == {np.ndarray}, "none was asked for"


COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")


def call(path: str, *given: Any, **options: Any) -> Any:
    """What a function returns, which is called with the run's args."""
    return load_object(path, "--x")(Arguments(Options(**options)), *given)


def test_numbers_of_samples_are_their_own() -> None:
    """Over all groups, whatever their size; a copy in another group has another."""
    samples = [a_sample(group=group).replace(response_index=i, group_size=4) for group in range(3) for i in range(4)]
    assert [sample.index for sample in samples] == list(range(12))
    assert samples[0].replace(group_index=5).index == 20 and samples[1].session_id == "0-1"


def test_statuses_and_what_is_none() -> None:
    made = a_sample()
    made.status = "truncated"  # type: ignore[assignment]  (as slime's tau-bench example writes it)
    made.check()
    assert made.status is TRUNCATED is Sample.Status.TRUNCATED and made.status == "truncated"  # type: ignore[attr-defined]
    made.status = "done"  # type: ignore[assignment]
    with pytest.raises(BadSample, match="status 'done'"):
        made.check()


def test_appended_tokens_stay_aligned() -> None:
    """Sampled tokens need log-probs, those of a tool must have none; lists are grown where they are."""
    sample = Sample(tokens=[1, 2])
    tokens = sample.tokens
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1, -2], text="ab")
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert tokens == [1, 2, 3, 4, 5] and tokens is sample.tokens
    assert (sample.loss_mask, sample.rollout_log_probs, sample.response_length) == ([1, 1, 0], [-1, -2, 0], 3)
    assert sample.effective_response_length == 2
    for wrong in ({"tokens": [1]}, {"tokens": [1], "log_probs": [0, 0]}, {"tokens": [1], "trainable": False} | LOG):
        with pytest.raises(ValueError, match="log_probs"):
            sample.append_response_tokens(**wrong)
    again = Sample.from_dict({**sample.to_dict(), "mine": 1})
    assert again == sample and again.mine == 1  # type: ignore[attr-defined]


LOG: dict[str, Any] = {"log_probs": [0]}


def test_args_are_a_copy_for_each_response() -> None:
    """All options under slime's names; what is no option, and a router where none may be asked, is said."""
    args = Arguments(Options(rm_type=["math"], custom={"max_turns": 4}))
    assert (args.rm_type, args.max_turns, args.ci_test, args.num_engines) == ("math", 4, False, Options().num_engines)
    for name, words in (("sglang_router_ip", "no engine can be"), ("nothing", "no option nothing")):
        with pytest.raises(AttributeError, match=words):
            getattr(args, name)
    one, other = args_of(Options(), object()), args_of(Options(), object())
    one.mine = 3
    twin = copy.deepcopy(one)
    assert not hasattr(other, "mine") and twin.mine == 3 and twin.engine is one.engine is not other.engine
    assert f"http://{one.sglang_router_ip}:{one.sglang_router_port}/generate" == "http://x:1/key/generate"


def scored(reward: float = 1.0) -> Sample:
    """A sample of a run with --reward-key score."""
    return a_sample(reward).replace(reward_key="score")


def test_dynamic_filter_of_slimes() -> None:
    options = Options(dynamic_sampling_filter_path=f"{HERE}.differs", reward_key="score")
    judge = DynamicFilter(options).judge
    assert asyncio.run(judge(0, 0, [scored(), scored(0.0)])).keep
    assert asyncio.run(judge(0, 0, [scored(), scored()])).reason == "all_same"


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
    whole, cut = a_sample(), a_sample(status=TRUNCATED)
    call(f"{HERE}.remove_truncated", [[whole], [cut]])
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
        assert sample.array("loss_mask").tolist() == [1, 1, 1], "a mask of None is all ones"


def test_rewards_that_are_objects_are_edited() -> None:
    """In place too, by the key that holds."""
    sample = hooked(a_sample().replace(reward_key="acc"), hook="scored", custom_generate_function_path="x.y")
    assert sample.score == -5.0 and sample.rewards["acc"] == -5.0


def test_what_is_not_graded_has_no_reward() -> None:
    assert a_sample(None).reward is None and a_sample(None).score == 0 and not a_sample(None).graded
    rewards = [grader.load_reward(f"{HERE}.sees_none", Options(custom_rm_path=f"{HERE}.sees_none"))]
    called = grader.call(rewards, Arguments(Options()), [a_sample(None)])
    [found] = asyncio.run(grader.grade(rewards, called, 1, None))
    assert found.values == {f"{HERE}.sees_none": 1.0}


def test_processed_rewards_of_slimes() -> None:
    found = call(f"{HERE}.centred", [scored(), scored(0.0)], reward_key="score")
    assert found == ([1.0, 0.0], [0.5, -0.5])


def test_numbers_of_metrics() -> None:
    """pass@k by hand: of 4 rewards with 2 right, two drawn hold a right one in 5 of 6 cases."""
    assert compute_pass_rate([1, 1, 0, 0], 4) == pytest.approx({"pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0})
    ragged = compute_pass_rate([1, 0, 0], 2, group_ids=["a", "a", "b"])
    assert ragged == pytest.approx({"pass@1": 0.25, "pass@2": 1.0})
    assert compute_pass_rate([1, 0], 1) == {}
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert dict_add_prefix({"a": 1}, "b/") == {"b/a": 1}


def test_group_rewards_of_slimes() -> None:
    one, other = a_sample(), a_sample()
    one.label, other.label = "text", "other"
    again = Arguments(Options(rm_type="exact"))
    assert asyncio.run(call(f"{HERE}.group_reward", [one, other], custom={"again": again})) == [2.0, 1.0]
