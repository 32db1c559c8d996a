"""The rollout process's hooks: what they may change, what their errors cost, and that what they return is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_points
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.custom_hooks import FailedHook, RolloutHooks
from hpcrl.rollout.grading.service import Grading
from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch
from tests.documents.test_customise import sample
from tests.support.options import GRPO, SFT

HERE = "tests.rollout.test_custom_hooks"


def hooks(**paths: Any) -> RolloutHooks:
    given = {
        name: [f"{HERE}.{one}" for one in path] if isinstance(path, list) else f"{HERE}.{path}"
        for name, path in paths.items()
    }
    options = Options(**given)
    return RolloutHooks(options, load_points(options, "rollout"))


# ---- a sample


def upper(options: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    sample.response = f"{sample.response.upper()} {rollout_id} {evaluation}"


async def another(options: Any, sample: Sample, **more: Any) -> Sample:
    await asyncio.sleep(0)
    return sample.replace(group_index=99, response=sample.response + "!", loss_mask=[0, 0, 0])


def on_bad(options: Any, sample: Sample, **more: Any) -> Any:
    if sample.response == "bad":
        raise KeyError("mine")
    if sample.response == "odd":
        return 3
    if sample.response == "cut":
        sample.loss_mask = sample.loss_mask[:1]
    return None


def length(options: Any, samples: Any) -> Any:
    return [len(s.response) for s in samples] if isinstance(samples, list) else len(samples.response)


def test_sample_hooks_run_in_order() -> None:
    """Hooks of a sample change or replace it, in order."""
    mine = hooks(rollout_sample_hook_path=["upper", "another"])
    one = sample("abc")
    mine.rollout_id = 7
    asyncio.run(mine.before_reward(one, evaluation=True))
    assert (one.response, one.group_index, one.array("loss_mask").tolist()) == ("ABC 7 True!", 0, [0, 0, 0])


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("bad", "raised KeyError: 'mine' (test_custom_hooks.py:"),
        ("odd", "returned 3, a Sample or"),
        ("cut", "set 1 loss_mask for a response of 3 tokens"),
    ],
)
def test_a_bad_sample_is_named(response: str, words: str) -> None:
    with pytest.raises(FailedHook) as caught:
        asyncio.run(hooks(rollout_sample_hook_path=["on_bad"]).before_reward(sample(response), evaluation=False))
    assert words in caught.value.text and f"--rollout-sample-hook-path {HERE}.on_bad" in caught.value.text


@pytest.mark.process
@pytest.mark.parametrize("group_rm", [False, True])
def test_a_hook_that_raises_costs_its_sample(group_rm: bool, capfd: pytest.CaptureFixture[str]) -> None:
    options = Options(
        custom_rm_path=f"{HERE}.length",
        group_rm=group_rm,
        rollout_sample_hook_path=[f"{HERE}.on_bad"],
    )
    samples = [sample("bad"), sample("good!", index=1)]

    async def body() -> None:
        grading = Grading(options, hooks=RolloutHooks(options, load_points(options, "rollout")))
        try:
            await grading.start()
            tally = grading.tally("rollout 0", 100, 2)
            await asyncio.gather(*(grading.grade(one, "p.jsonl, line 1", tally) for one in samples))
        finally:
            await grading.close()

    asyncio.run(body())
    assert [(one.reward, one.grading) for one in samples] == [(0.0, "error"), (5.0, "")]
    said = capfd.readouterr().err
    assert "on_bad raised KeyError: 'mine'" in said and "Traceback" in said


# ---- a rollout


def removes_odd(options: Any, groups: list[list[Sample]]) -> None:
    assert [[one.response_index for one in group] for group in groups] == [[0, 1], [0, 1]]
    for group in groups:
        group[1].remove_sample = True


SEEN: list[Any] = []


def sees(options: Any, groups: list[list[Sample]], data_source: Any) -> None:
    SEEN.append(([[one.group_index for one in group] for group in groups], data_source))


def rollout() -> list[Sample]:
    return [
        sample("abc", index, reward=group + index).replace(group_index=group) for group in (0, 2) for index in (0, 1)
    ]


def test_filtered_samples_leave_the_loss() -> None:
    """Filtered samples are left out of the loss, and all samples are shown."""
    samples, dropped = rollout(), [sample().replace(group_index=1)]
    asyncio.run(
        hooks(rollout_sample_filter_path="removes_odd", rollout_all_samples_process_path="sees").filter(
            samples, dropped, "s"
        )
    )
    assert [one.array("loss_mask").tolist() for one in samples] == [[1, 1, 1], [0, 0, 0]] * 2
    assert [one.reward for one in samples] == [0, 1, 2, 3] and [*SEEN.pop()] == [[[0, 0], [1], [2, 2]], "s"]


def adds(rollout_id: int, options: Any, samples: list[Sample], metrics: dict[str, Any], seconds: float) -> None:
    metrics["mine"] = np.float32(len(samples) + rollout_id + seconds)


def replaces(*given: Any) -> bool:
    adds(*given)
    return True


def spoils(*given: Any) -> None:
    given[3]["mine"] = "text"


def of_evaluation(rollout_id: int, options: Any, data: dict[str, Any], metrics: dict[str, Any]) -> bool:
    metrics["a"]["mine"] = sum(data["a"]["rewards"]) + len(data["a"]["samples"])
    return rollout_id > 0


def test_metrics_are_added_to_or_replaced() -> None:
    usual = {"rollout/reward": 1.0, "perf/rollout_time": 2.0}
    run = lambda name: asyncio.run(hooks(custom_rollout_log_function_path=name).log(rollout(), dict(usual), 0.5))  # noqa: E731
    assert run("adds") == usual | {"mine": 4.5} and run("replaces") == {"perf/rollout_time": 2.0, "mine": 4.5}
    with pytest.raises(
        HpcrlError,
        match=f"--custom-rollout-log-function-path {HERE}.spoils, metric 'mine', returned 'text'",
    ):
        run("spoils")
    mine = hooks(custom_eval_rollout_log_function_path="of_evaluation")
    for rollout_id, wanted in ((0, {"accuracy": 0.5, "n": 4.0, "mine": 10.0}), (1, {"n": 4.0, "mine": 10.0})):
        mine.rollout_id = 7  # the one that is made meanwhile
        found = asyncio.run(mine.log_evaluation(rollout_id, {"a": rollout()}, {"a": {"accuracy": 0.5, "n": 4}}))
        assert found == {"a": wanted}


# ---- what the trainer gets


def negated(options: Any, samples: list[Sample]) -> Any:
    return [one.reward for one in samples], np.array([-one.reward for one in samples])


def nothing(options: Any, samples: list[Sample]) -> None:
    return None


def as_dict(options: Any, samples: list[Sample], **change: Any) -> dict[str, Any]:
    return {
        "tokens": [one.array("tokens").tolist() for one in samples],
        "response_lengths": [2 for _ in samples],
        "rewards": [one.reward * 2 for one in samples],
        "rollout_log_probs": [[-1.0, -2.0] for _ in samples],
    } | change


def as_list(options: Any, samples: list[Sample]) -> list[Sample]:
    return list(reversed(samples))


def too_few(options: Any, samples: list[Sample]) -> list[Sample]:
    return samples[:1]


def strange(options: Any, samples: list[Sample]) -> Any:
    return as_dict(options, samples, teacher=[0] * len(samples))


def ragged(options: Any, samples: list[Sample]) -> Any:
    return as_dict(options, samples, loss_masks=[[1]] * len(samples))


def raises(options: Any, samples: list[Sample]) -> Any:
    raise RuntimeError("mine")


def converted(**paths: str) -> tuple[SampleBatch, dict[str, float]]:
    metrics: dict[str, float] = {}
    return asyncio.run(hooks(**paths).batch(rollout(), metrics)), metrics


def test_trainer_sees_changed_rewards() -> None:
    """The trainer sees the changed rewards, and the files do not."""
    samples, metrics = rollout(), {}
    batch = asyncio.run(hooks(custom_reward_post_process_path="negated").batch(samples, metrics))
    assert batch.rows["reward"].tolist() == [0, -1, -2, -3] and [one.reward for one in samples] == [0, 1, 2, 3]
    assert metrics == {"rollout/raw_reward": 1.5}


def test_train_data_is_samples_or_slimes() -> None:
    assert converted()[0].rows["reward"].tolist() == [0, 1, 2, 3]
    assert converted(custom_convert_samples_to_train_data_path="as_list")[0].rows["reward"].tolist() == [3, 2, 1, 0]
    batch, _ = converted(custom_convert_samples_to_train_data_path="as_dict", custom_reward_post_process_path="negated")
    assert batch.rows["reward"].tolist() == [0, -2, -4, -6] and batch.rows["group_index"].tolist() == [0, 0, 2, 2]
    assert (
        batch.rollout_log_probs.tolist() == [-1, -2] * 4
        and batch.loss_mask.tolist() == [1, 1] * 4
        and len(batch.versions) == 8
    )


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"custom_reward_post_process_path": "nothing"}, "returned None; two lists"),
        (
            {"custom_convert_samples_to_train_data_path": "nothing"},
            "NoneType, expected train data",
        ),
        (
            {"custom_convert_samples_to_train_data_path": "too_few"},
            "returned list of 1, expected train data of 4 samples",
        ),
        ({"custom_convert_samples_to_train_data_path": "strange"}, ": teacher"),
        (
            {"custom_convert_samples_to_train_data_path": "ragged"},
            "set 1 loss_mask for a response of 2 tokens",
        ),
        (
            {"custom_convert_samples_to_train_data_path": "raises"},
            "raises raised RuntimeError: mine (test_custom_hooks.py:",
        ),
    ],
)
def test_what_they_return_is_checked(paths: dict[str, str], words: str) -> None:
    with pytest.raises(HpcrlError) as caught:
        converted(**paths)
    assert words in str(caught.value) and str(caught.value).startswith("--" + next(iter(paths)).replace("_", "-"))


# ---- at the start


def wrong(sample: Any) -> None: ...


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"rollout_sample_hook_path": ["wrong"]}, "wrong takes (sample): "),
        ({"rollout_sample_hook_path": ["upper", "absent"]}, f"{HERE}.absent: {HERE} has no absent"),
        ({"rollout_sample_filter_path": "wrong"}, "declare it: def wrong(options, groups)"),
    ],
)
def test_a_wrong_function_is_named_at_the_start(paths: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        hooks(**paths)
    assert words in str(caught.value)


def test_a_name_without_a_module_is_no_function() -> None:
    with pytest.raises(UsageError, match="--rollout-sample-filter-path mine is not a module.function"):
        load_points(Options(rollout_sample_filter_path="mine"), "rollout")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            GRPO | {"custom_reward_post_process_path": "m.f"},
            "group's rewards; give --disable-rewards-normalization too",
        ),
        (GRPO | {"custom_eval_rollout_log_function_path": "m.f"}, "has no effect here: --eval-interval is not given"),
        (SFT | {"rollout_sample_hook_path": ["m.f"]}, "has no effect here: --loss-type sft_loss grades nothing"),
    ],
)
def test_what_has_no_effect_is_an_error(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(Options(**values))
    assert words in str(caught.value)


def test_what_has_one_is_none() -> None:
    more: Callable[..., dict[str, Any]] = lambda **values: GRPO | values  # noqa: E731
    check_options(Options(**more(custom_reward_post_process_path="m.f", disable_rewards_normalization=True)))
    check_options(Options(**more(custom_reward_post_process_path="m.f", advantage_estimator="my.own")))
