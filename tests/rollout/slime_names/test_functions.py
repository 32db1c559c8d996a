"""Functions written for slime or vime run as they are: exact tokens, log-probs, aborts, rewards in other processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED
from tests.rollout.samplers.test_custom import asked, check, sampler
from tests.support.two_ways import make_model, words

pytestmark = pytest.mark.process
HERE = "tests.support.own_slimes"
MADE = ("tool_user", "by_text", "encoded_again", "encoded_again/some", "vllms", "refused")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """What one sampler made of each function; policy-NAME: what was asked for it."""

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        values = {
            "custom_generate_function_path": f"{HERE}.by_label",
            "custom_rm_path": f"{HERE}.reward",
            "reward_key": "score",
            "rollout_max_response_len": 8,
        }
        async with sampler(model, "", graded=True, **values) as (made, policy):
            for name in MADE:
                policy.asked = []
                found[name] = await made.make(asked(model, label=name))
                found[f"policy-{name}"] = policy.asked
            policy.asked = []
            policy.ends = {2: 2}  # its second turn is ended early
            found["ended"] = await made.make(asked(model, label="tool_user"))
            policy.asked, policy.begun, policy.ends = [], [], {}
            again = replace(asked(model, label="tool_user"), partial=tuple(found["ended"]), rollout_id=4, version=9)
            found["whole"] = await made.make(again)
            found["policy-whole"], found["begun-whole"] = policy.asked, policy.begun
        return found

    return asyncio.run(run())


def test_turns_are_carried_back_exactly(model: Path, found: dict[str, Any]) -> None:
    """Tokens, mask, log-probs and versions of two turns are those that were sampled; both turns may be longer together
    than --rollout-max-response-len, which bounds each in slime."""
    [sample] = found["tool_user"]
    check(sample)
    words_of = words(make_tokenizer(model), sample.tokens[-sample.response_length :])
    assert words_of == ["a", "b", "<|end|>", "m", "o", "r", "e", "a", "b", "<|end|>"]
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert np.allclose(
        [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m], [-0.125, -0.25, -0.375] * 2
    )
    assert sample.versions == [8] * 7 + [7] * 3, "what a tool says has the version before it"
    first, second = (tokens for tokens, _, _ in found["policy-tool_user"])
    assert first == sample.tokens[:-10] == asked(model).group.prompt.tokens.tolist()
    assert second == sample.tokens[:-3]
    assert (sample.status, sample.response) == (COMPLETED, "ab<|end|>moreab<|end|>")


def make_tokenizer(model: Path) -> Any:
    from hpcrl.rollout.prompts.tokenizer import Tokenizer

    return Tokenizer(model)


def test_a_reward_sees_what_was_set_on_the_sample(found: dict[str, Any]) -> None:
    """Attributes that are plain data reach the reward's process: 1 for the answer, 2 for the turns."""
    [sample] = found["tool_user"]
    assert (sample.score, sample.turns, sample.attributes()) == (3.0, 2, {"turns": 2})
    assert sample.rewards["acc"] == 1.0


def test_log_probs_that_are_left_out_are_found(found: dict[str, Any]) -> None:
    """By the tokens, also when it asks over a client of its own; and its own reward is taken."""
    [sample] = found["by_text"]
    assert np.allclose(sample.rollout_log_probs, [-0.125, -0.25, -0.375]) and sample.loss_mask == [1, 1, 1]
    assert sample.score == 1.0 and UNSAMPLED not in sample.metadata
    assert len(set(sample.versions)) == 1


def test_text_encoded_again_is_not_trained(found: dict[str, Any]) -> None:
    """Of a sample that has tokens of an engine too these alone are; of one without any the response has failed."""
    [sample] = found["encoded_again"]
    assert "that no engine sampled" in sample.grading_error and not any(sample.loss_mask)
    [sample] = found["encoded_again/some"]
    check(sample)
    assert sample.loss_mask == [1, 1, 1, 0, 0] and sample.metadata[UNSAMPLED] == 2
    assert np.allclose(sample.rollout_log_probs[:3], [-0.125, -0.25, -0.375])
    assert sample.score == 1.0


def test_vimes_functions_ask_as_vllm_is_asked(found: dict[str, Any]) -> None:
    [sample] = found["vllms"]
    check(sample)
    assert sample.loss_mask == [1, 1, 1] and np.allclose(sample.rollout_log_probs, [-0.125, -0.25, -0.375])


def test_what_the_run_does_not_do_is_said(found: dict[str, Any]) -> None:
    [sample] = found["refused"]
    assert sample.grading == "error" and "changes temperature to 0.1" in sample.grading_error
    assert found["policy-refused"] == [], "no engine was asked"


def test_an_aborted_response_begins_again(found: dict[str, Any]) -> None:
    """The function is called again, with a fresh sample; both turns are sampled again."""
    [ended] = found["ended"]
    assert ended.status == ABORTED and not ended.response_length
    [whole] = found["whole"]
    check(whole)
    assert whole.tokens == found["tool_user"][0].tokens
    assert found["begun-whole"] == [[], []]


def test_agents_share_args_and_grade_each_other(model: Path) -> None:
    """Several samples of one response, made with copies of args, graded by the run's reward within the function."""

    async def run() -> list[Sample]:
        values = {"custom_generate_function_path": f"{HERE}.agents", "rm_type": "f1"}
        async with sampler(model, "", graded=True, **values) as (made, _):
            return await made.make(asked(model, label="ab<|end|>"))

    samples = asyncio.run(run())
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert len({tuple(sample.tokens) for sample in samples}) == 2
    for sample in samples:
        check(sample)
