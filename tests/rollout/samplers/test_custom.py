"""Samples that an own function makes: several turns with exact tokens, fan-out, agents at the endpoint, and what goes
wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.grading.service import GradedBy, Grading
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.samplers.sampler import HeldOutSet, ResponseRequest
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED
from hpcrl.utils.waiting import Deadline
from tests.support.able import needs
from tests.support.two_ways import Policy, make_model, words

pytestmark = pytest.mark.process
HERE = "tests.support.own_generates"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def sampler(
    model: Path, name: str, graded: bool = False, **values: Any
) -> AsyncIterator[tuple[CustomSampler, Policy]]:
    """graded: by the options' reward, where the function sets none."""
    options = Options(
        **{
            "hf_checkpoint": str(model),
            "custom_generate_function_path": f"{HERE}.{name}",
            "rollout_max_response_len": 24,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "apply_chat_template": True,
            "reward_max_failed": 1.0,
        }
        | values
    )
    tokenizer = Tokenizer(model)
    grading = Grading(options, []) if graded else None
    made = CustomSampler(options, tokenizer, grading)
    policy = Policy(tokenizer)
    made.use(policy, lambda: 256)  # type: ignore[arg-type]
    try:
        await made.start()
        if grading is not None:
            await grading.start()
        yield made, policy
    finally:
        await made.close()
        if grading is not None:
            await grading.close()


def asked(
    model: Path, index: int = 1, number: int = 0, label: str = "", held_out: HeldOutSet | None = None
) -> ResponseRequest:
    tokenizer = Tokenizer(model)
    text = tokenizer.render([{"role": "user", "content": "1+1="}], generation=True)
    prompt = Prompt("1+1=", tokenizer.encode([text])[0], label, where=f"p.jsonl, line {number + 1}")
    return ResponseRequest(Group(number, prompt), index, 3, 7, held_out)


def check(sample: Sample) -> None:
    """What the trainer relies on."""
    n = sample.response_length
    assert (len(sample.array("loss_mask")), len(sample.array("rollout_log_probs")), len(sample.array("versions"))) == (
        n,
        n,
        n,
    ) and 0 < n < len(sample.array("tokens"))
    assert not sample.array("rollout_log_probs")[sample.array("loss_mask") == 0].any()


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """What one sampler made, one after another; policy-NAME: what was asked for it."""

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with sampler(model, "by_label") as (made, policy):
            held = HeldOutSet("held", 4, 1, Sampling.from_options(Options(), Tokenizer(model), True), GradedBy(()))
            for name, label, index, held_out in (
                ("turns", "two_turns", 1, None),
                ("several", "fans_out", 0, None),
                ("one", "fans_out", 1, None),
                ("held", "fans_out", 1, held),
                ("hand", "at_the_engine", 1, None),
                ("agent", "an_agent", 1, None),
            ):
                policy.asked = []
                found[name] = await made.make(asked(model, index, label=label, held_out=held_out))
                found[f"policy-{name}"] = policy.asked
            policy.broken = PeerError("engine-0 answered a completion without tokens")
            with pytest.raises(PeerError) as error:
                await made.make(asked(model, label="at_the_engine"))
            found["broken"] = str(error.value)
            policy.broken = None
            policy.status = ABORTED
            found["ended"] = await made.make(asked(model, label="two_turns"))
            policy.status, policy.ends = "", {len(policy.asked) + 2: 2}
            found["second-ended"] = await made.make(asked(model, label="two_turns"))
            policy.asked = []
            policy.begun = []
            policy.ends = {}
            begun = tuple(found["second-ended"])
            again = replace(asked(model, label="two_turns"), partial=begun, rollout_id=4, version=9)
            found["whole"] = await made.make(again)
            found["policy-whole"], found["begun-whole"] = policy.asked, policy.begun
            policy.asked = []
            done = replace(again, partial=(found["whole"][0].replace(reward=None),))
            found["graded"] = await made.make(done)
            assert not policy.asked, "it is finished, and waits for its reward alone"
        return found

    return asyncio.run(run())


def test_turns_keep_their_tokens(model: Path, found: dict[str, Any]) -> None:
    """Turns keep the sampled tokens, which encoding the text again would not."""
    [sample], requests = found["turns"], found["policy-turns"]
    check(sample)
    tokenizer = Tokenizer(model)
    said = ["a", "b", "<|end|>"]
    told = ["<|user|>", "<", "ab", ">", "<|end|>", "<|assistant|>"]
    assert words(tokenizer, sample.tokens[-sample.response_length :]) == [*said, *told, *said]
    assert sample.loss_mask == [1] * 3 + [0] * 6 + [1] * 3
    assert sample.versions == [8] * 9 + [7] * 3, "each token knows its version; what a tool says has that before it"
    assert np.allclose(
        [p for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m], [-0.125, -0.25, -0.375] * 2
    )
    assert requests[1][0] == sample.tokens[:-3], "the second turn saw the very tokens of the first"
    again = tokenizer.encode([tokenizer._hf.decode(sample.tokens)])[0]
    assert again.tolist() != sample.tokens and "ab" in words(tokenizer, again[:9])
    assert (sample.reward, sample.status, sample.metadata) == (1.0, COMPLETED, {"evaluation": False})
    assert sample.transcript == {"turns": [[1, 9], [0, 32], [1, 2]]} and len(sample.response) == 43
    assert len({seed for _, _, seed in requests}) == 2


THINKING = (  # as Qwen3's: a newline behind a turn's end, thoughts of earlier turns left out
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('>')[-1] if m['role'] == 'assistant' else "
    "m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_template_that_rewrites_turns(tmp_path: Path) -> None:
    """A template that rewrites earlier turns does not touch their tokens."""
    model = make_model(tmp_path, THINKING)

    async def run() -> list[Sample]:
        async with sampler(model, "two_turns") as (made, policy):
            policy.tokens = [Tokenizer(model)._hf.convert_tokens_to_ids(word) for word in ("c", ">", "a")]
            return await made.make(asked(model))

    [sample] = asyncio.run(run())
    said = ["c", ">", "a", "<|end|>"]
    told = ["\n", "<|user|>", "<", "c", ">", "a", ">", "<|end|>", "\n", "<|assistant|>"]
    assert words(Tokenizer(model), sample.array("tokens")[-sample.response_length :]) == [*said, *told, *said]


def test_several_samples_and_evaluations(
    found: dict[str, Any],
) -> None:
    """One response may be several samples, and evaluations use the function too."""
    several = found["several"]
    one = found["one"]
    held = found["held"]
    assert (len(several), len(one), len(held)) == (2, 1, 1)
    for sample in (*several, *one, *held):
        check(sample)
        assert sample.grading == "error" and "set no reward" in sample.grading_error and sample.reward == 0
    seeds = [seed for name in ("several", "one", "held") for _, _, seed in found[f"policy-{name}"]]
    assert len(set(seeds)) == 4, "two alike requests of a response have noise of their own, and evaluations too"


def test_named_parts_stay_where_the_runs_reward_grades(model: Path) -> None:
    async def run() -> list[Sample]:
        values = {"custom_rm_path": "tests.support.own_rewards.as_object", "reward_key": "score"}
        async with sampler(model, "names_parts", graded=True, **values) as (made, _):
            return await made.make(asked(model))

    first, last = asyncio.run(run())
    assert (first.score, last.score, last.grading) == (0.5, 0.5, "")
    assert (first.rewards["turns"], last.rewards["turns"]) == (2.0, 3.0)
    assert first.rewards["score"] == last.rewards["score"] == 0.5 and first.rewards["length"] == len(last.response)


def test_exact_tokens_by_hand_as_a_function_of_slimes(found: dict[str, Any]) -> None:
    [sample] = found["hand"]
    check(sample)
    assert (sample.reward, sample.response, sample.response_length) == (1.0, "ab", 3)


def test_plain_agent_makes_exact_samples(model: Path, found: dict[str, Any]) -> None:
    """An agent that knows nothing of hpcrl makes exact samples."""
    [sample] = found["agent"]
    check(sample)
    tokenizer = Tokenizer(model)
    said = ["a", "b", "<|end|>"]
    told = ["<|user|>", "m", "o", "r", "e", "<|end|>", "<|assistant|>"]
    assert words(tokenizer, sample.tokens[-sample.response_length :]) == [*said, *told, *said]
    assert sample.loss_mask == [1] * 3 + [0] * 7 + [1] * 3
    assert sample.tokens[: -sample.response_length] == asked(model).group.prompt.tokens.tolist()
    assert {sampling.temperature for _, sampling, _ in found["policy-agent"]} == {1.0}, (
        "sampled as the run samples, whatever was asked"
    )
    assert sample.reward == 0.5 and [own for own, _ in sample.transcript["turns"]] == [1, 0, 1]


TROUBLES = {
    "raise": "raised LookupError: no such tool (own_generates.py:",
    "hang": "took more than 3 s besides its engines, a limit that --timeout-factor scales",
    "none": "returned None, but asked nothing at the endpoint",
    "number": "returned a int, not a sample",
    "short": "set 2 rollout_log_probs for a response of 3 tokens",
    "temperature": "sampling_params changes temperature to 0.1",
    "long": "set 3 loss_mask for a response of 4 tokens",
    "nan": "set the reward to nan",
    "object": "is not plain data",
    "die": "ended its process (exit status 3)",
    "block": "blocked its process",
}


def test_a_call_that_fails_costs_its_response_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> dict[str, list[list[Sample]]]:
        async with sampler(model, "troubled", timeout_factor=1 / 100) as (made, _):
            return {
                kind: await asyncio.gather(*(made.make(asked(model, index, label=kind)) for index in range(4)))
                for kind in TROUBLES
            }

    for kind, ((bad,), *good) in asyncio.run(run()).items():
        assert TROUBLES[kind] in bad.grading_error and bad.grading == (
            "timeout" if kind in ("hang", "block") else "error"
        )
        assert bad.reward == 0 and bad.array("loss_mask").tolist() == [0] and bad.response_length == 1
        for (sample,) in good:
            check(sample)
            assert sample.reward == 1 and not sample.grading
            assert sample.remove_sample == (sample.response_index == 1), "what the function says of its sample is kept"
    assert "; its 4 calls are" in capsys.readouterr().err


@needs("namespaces")
def test_a_lost_sandbox_costs_no_response(model: Path) -> None:
    """The call is made again, in another box; three times at most."""

    async def run() -> tuple[list[Sample], dict[str, float]]:
        async with sampler(model, "loses_its_sandbox") as (made, _):
            samples = [sample for index in (1, 0) for sample in await made.make(asked(model, index))]
            deadline = Deadline(30)  # the process counts after its answer
            while made.pool.sandboxes.done["lost"] < 4 and not deadline.over:
                await asyncio.sleep(0.01)
            return samples, dict(made.pool.sandboxes.done)

    (good, bad), done = asyncio.run(run())
    assert (done["lost"], done["handed_out"]) == (4, 5) and done["seconds"] > 0 and done["waited"] > 0
    assert [one["command"] for one in good.transcript["commands"]] == ["echo from the box"]
    assert good.transcript["commands"][0]["code"] == 0 and "code" not in bad.transcript["commands"][0]
    check(good)
    assert good.response == "from the box\n" and good.metadata["calls"] == 2 and not good.grading
    assert "the tool failed" in bad.grading_error and bad.grading == "error" and bad.array("loss_mask").tolist() == [0]


def test_failures_and_the_limit(model: Path) -> None:
    """Too many failures end the run; one bad prompt does not."""

    async def run() -> None:
        async with sampler(model, "troubled", reward_max_failed=0.05) as (made, _):
            for number in (0, 0):
                await made.make(asked(model, 0, number, "raise"))
            with pytest.raises(
                HpcrlError, match=r"3 of the 16 generations of rollout 3 failed, more than --reward-max-failed"
            ):
                await made.make(asked(model, 0, 1, "raise"))

    asyncio.run(run())


def test_deterministic_retry_with_more_time(model: Path) -> None:
    """In deterministic mode, failed samples are made again with more time."""

    async def run() -> tuple[float, list[Sample]]:
        async with sampler(model, "troubled", timeout_factor=0.001, deterministic_mode=True) as (made, _):
            begun = time.monotonic()
            found = await made.make(asked(model, 0, label="hang"))
            return time.monotonic() - begun, found

    took, [bad] = asyncio.run(run())
    assert took > 1.3 and "took more than 1.2 s" in bad.grading_error


def test_engine_failure_and_unneeded_response(found: dict[str, Any]) -> None:
    """An engine's failure is the run's, and a response that is not needed is returned."""
    assert found["broken"].startswith("engine-0 ") and "without tokens" in found["broken"]
    for name in ("ended", "second-ended"):
        [sample] = found[name]
        assert sample.status == ABORTED and sample.response_length == 0


def test_aborted_response_begins_again(found: dict[str, Any]) -> None:
    """Its second turn was ended behind two tokens; both are sampled again, under the new policy."""
    assert len(found["policy-whole"]) == 2 and found["begun-whole"] == [[], []]
    [sample], [never_ended] = found["whole"], found["turns"]
    check(sample)
    assert sample.tokens == never_ended.tokens
    assert sample.loss_mask == never_ended.loss_mask and min(sample.versions) >= 9
    [graded] = found["graded"]
    assert graded.tokens == sample.tokens and graded.grading == "error" and "set no reward" in graded.grading_error


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{HERE}.two", "takes (args, sample)"),
        (f"{HERE}.plain", "is not async"),
        (f"{HERE}.absent", "has no absent"),
        ("no_such_module.f", "cannot be imported"),
    ],
)
def test_a_wrong_function_is_refused_at_the_start(model: Path, path: str, words: str) -> None:
    async def run() -> None:
        async with sampler(model, "", custom_generate_function_path=path):
            pass

    with pytest.raises(UsageError) as error:
        asyncio.run(run())
    assert f"--custom-generate-function-path {path}" in str(error.value) and words in str(error.value)
