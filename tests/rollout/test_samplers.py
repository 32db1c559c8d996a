"""Samples that an own function makes: several turns with exact tokens, fan-out, agents at the endpoint, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.rollout.engines.generate import Completion, Sampling
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.samplers.sampler import Asked, HeldOutSet
from hpcrl.sample import COMPLETED, TRUNCATED, Sample
from tests.support.tiny import CHAT, SPECIAL

pytestmark = pytest.mark.process
LETTERS = ["a", "b", "c", "<", ">", "m", "o", "r", "e", "1", "+", "=", "\n", "user", "assistant", "ab"]
HERE = "tests.support.own_generates"


def make_model(path: Path, template: str = CHAT) -> Path:
    """A tokenizer that writes `ab` in one token, though the policy may say it in two."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*SPECIAL, *LETTERS])}
    inner = Fast(models.WordLevel(words, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"user|assistant|ab|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": "<|unk|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=["<|user|>", "<|assistant|>"], **special)
    fast.chat_template = template
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 256, "eos_token_id": 1}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class Policy:
    """In the engines' place: says `ab` in two tokens, then ends; counts what it is asked."""

    def __init__(self, tokenizer: Tokenizer, say: Sequence[str] = ("a", "b")) -> None:
        ids = tokenizer._hf.convert_tokens_to_ids
        self.tokens = [ids(word) for word in say]
        self.end, self.asked = ids("<|end|>"), []
        self.broken: HpcrlError | None = None

    async def complete(self, prompt: np.ndarray, sampling: Sampling, seed: int | None, version: int, **_: Any) -> Completion:
        self.asked.append((prompt.tolist(), sampling, seed))
        if self.broken:
            raise self.broken
        await asyncio.sleep(0.01)
        tokens = [*self.tokens, self.end][: sampling.max_tokens]
        count, whole = len(tokens), len(tokens) == len(self.tokens) + 1
        logprobs = -np.arange(1, count + 1, dtype=np.float32) / 8
        versions = np.full(count, version + len(self.asked) % 2, np.int32)
        return Completion(np.asarray(tokens, np.int32), logprobs, versions, COMPLETED if whole else TRUNCATED)


@asynccontextmanager
async def sampler(model: Path, name: str, **values: Any) -> AsyncIterator[tuple[CustomSampler, Policy]]:
    options = Options(
        **{
            "hf_checkpoint": str(model),
            "custom_generate_function_path": f"{HERE}.{name}",
            "rollout_max_response_len": 24,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "apply_chat_template": True,
            "custom_generate_max_failed": 1.0,
        }
        | values
    )
    tokenizer = Tokenizer(model)
    made = CustomSampler(options, PromptFile(Path("p.jsonl"), (), 0, ""), tokenizer, None, "127.0.0.1")
    policy = Policy(tokenizer)
    made.use(policy, lambda: 256)  # type: ignore[arg-type]
    try:
        await made.start()
        yield made, policy
    finally:
        await made.close()


def asked(model: Path, index: int = 1, number: int = 0, label: str = "", held_out: HeldOutSet | None = None) -> Asked:
    tokenizer = Tokenizer(model)
    text = tokenizer.render([{"role": "user", "content": "1+1="}], generation=True)
    prompt = Prompt(number + 1, "1+1=", tokenizer.encode([text])[0], label)
    return Asked(Group(number, prompt), index, 3, 7, held_out)


def words(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return tokenizer._hf.convert_ids_to_tokens(list(map(int, tokens)))


def check(sample: Sample) -> None:
    """What the trainer relies on."""
    n = sample.response_length
    assert (len(sample.loss_mask), len(sample.logprobs), len(sample.versions)) == (n, n, n) and 0 < n < len(sample.tokens)
    assert not sample.logprobs[sample.loss_mask == 0].any()


def test_turns_keep_the_tokens_that_were_said_and_a_second_encoding_would_not(model: Path) -> None:
    async def run() -> tuple[list[Sample], Policy]:
        async with sampler(model, "two_turns") as (made, policy):
            return await made.make(asked(model)), policy

    [sample], policy = asyncio.run(run())
    check(sample)
    tokenizer = Tokenizer(model)
    said = ["a", "b", "<|end|>"]
    told = ["<|user|>", "<", "ab", ">", "<|end|>", "<|assistant|>"]
    assert words(tokenizer, sample.tokens[-sample.response_length :]) == [*said, *told, *said]
    assert sample.loss_mask.tolist() == [1] * 3 + [0] * 6 + [1] * 3
    assert sample.versions.tolist() == [8] * 9 + [7] * 3, "each token knows its version; what a tool says has that before it"
    assert np.allclose(sample.logprobs[sample.loss_mask == 1], [-0.125, -0.25, -0.375] * 2)
    assert policy.asked[1][0] == sample.tokens[:-3].tolist(), "the second turn saw the very tokens of the first"
    again = tokenizer.encode([tokenizer._hf.decode(sample.tokens.tolist())])[0]
    assert again.tolist() != sample.tokens.tolist() and "ab" in words(tokenizer, again[:9])
    assert (sample.reward, sample.status, sample.metadata) == (1.0, COMPLETED, {"evaluation": False})
    assert len({seed for _, _, seed in policy.asked}) == 2


THINKING = (  # as Qwen3's: a newline behind a turn's end, thoughts of earlier turns left out
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('>')[-1] if m['role'] == 'assistant' else m['content'] }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_does_not_touch_them(tmp_path: Path) -> None:
    model = make_model(tmp_path, THINKING)

    async def run() -> list[Sample]:
        async with sampler(model, "two_turns") as (made, policy):
            policy.tokens = [Tokenizer(model)._hf.convert_tokens_to_ids(word) for word in ("c", ">", "a")]
            return await made.make(asked(model))

    [sample] = asyncio.run(run())
    said = ["c", ">", "a", "<|end|>"]
    told = ["\n", "<|user|>", "<", "c", ">", "a", ">", "<|end|>", "\n", "<|assistant|>"]
    assert words(Tokenizer(model), sample.tokens[-sample.response_length :]) == [*said, *told, *said]


def test_one_response_may_be_several_samples_and_evaluations_are_made_by_the_function_too(model: Path) -> None:
    async def run() -> tuple[Any, ...]:
        async with sampler(model, "fans_out") as (made, policy):
            several, one = await made.make(asked(model, 0)), await made.make(asked(model, 1))
            held = HeldOutSet("held", Path("h.jsonl"), 4, 1)
            return several, one, await made.make(asked(model, 1, held_out=held)), policy

    several, one, held, policy = asyncio.run(run())
    assert (len(several), len(one), len(held)) == (2, 1, 1)
    for sample in (*several, *one, *held):
        check(sample)
        assert sample.grading == "error" and "set no reward" in sample.grading_error and sample.reward == 0
    seeds = [seed for _, _, seed in policy.asked]
    assert len(set(seeds)) == 4, "two alike requests of a response have noise of their own, and evaluations too"


def test_exact_tokens_by_hand_as_a_function_of_slimes(model: Path) -> None:
    async def run() -> list[Sample]:
        async with sampler(model, "at_the_engine") as (made, _):
            return await made.make(asked(model))

    [sample] = asyncio.run(run())
    check(sample)
    assert (sample.reward, sample.response, sample.response_length) == (1.0, "ab", 3)


def test_an_agent_that_knows_nothing_of_hpcrl_makes_exact_samples(model: Path) -> None:
    async def run() -> tuple[list[Sample], Policy]:
        async with sampler(model, "an_agent") as (made, policy):
            return await made.make(asked(model)), policy

    [sample], policy = asyncio.run(run())
    check(sample)
    tokenizer = Tokenizer(model)
    said, told = ["a", "b", "<|end|>"], ["<|user|>", "m", "o", "r", "e", "<|end|>", "<|assistant|>"]
    assert words(tokenizer, sample.tokens[-sample.response_length :]) == [*said, *told, *said]
    assert sample.loss_mask.tolist() == [1] * 3 + [0] * 7 + [1] * 3
    assert sample.tokens[: -sample.response_length].tolist() == asked(model).group.prompt.tokens.tolist()
    assert {sampling.temperature for _, sampling, _ in policy.asked} == {1.0}, "sampled as the run samples, whatever was asked"
    assert sample.reward == 0.5


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", "raised LookupError: no such tool (own_generates.py:"),
        ("hang", "took more than --custom-generate-timeout 1 s"),
        ("none", "returned None, but asked nothing at the endpoint"),
        ("number", "returned a int, not a sample"),
        ("short", "set 2 logprobs for a response of 3 tokens"),
        ("temperature", "sampling_params changes temperature to 0.1"),
        ("long", "set 3 loss_mask for a response of 4 tokens"),
        ("nan", "set the reward to nan"),
        ("die", "ended its process (exit status 3)"),
        ("block", "blocked its process"),
    ],
)
def test_a_call_that_fails_costs_its_response_alone(model: Path, kind: str, words: str) -> None:
    async def run() -> list[list[Sample]]:
        async with sampler(model, "troubled", custom_generate_timeout=1) as (made, _):
            return await asyncio.gather(*(made.make(asked(model, index, label=kind)) for index in range(4)))

    (bad,), *good = asyncio.run(run())
    assert words in bad.grading_error and bad.grading == ("timeout" if kind in ("hang", "block") else "error")
    assert bad.reward == 0 and bad.loss_mask.tolist() == [0] and bad.response_length == 1
    for (sample,) in good:
        check(sample)
        assert sample.reward == 1 and not sample.grading


def test_too_many_failures_end_the_run_one_bad_prompt_does_not(model: Path) -> None:
    async def run(numbers: Sequence[int]) -> None:
        async with sampler(model, "troubled", custom_generate_max_failed=0.05) as (made, _):
            for number in numbers:
                await made.make(asked(model, 0, number, "raise"))

    asyncio.run(run([0, 0]))
    with pytest.raises(HpcrlError, match=r"2 of the 16 generations of rollout 3 failed, more than --custom-generate-max-failed"):
        asyncio.run(run([0, 1]))


def test_in_deterministic_mode_what_failed_is_made_again_with_more_time(model: Path) -> None:
    async def run() -> tuple[float, list[Sample]]:
        async with sampler(model, "troubled", custom_generate_timeout=0.3, deterministic_mode=True) as (made, _):
            begun = time.monotonic()
            found = await made.make(asked(model, 0, label="hang"))
            return time.monotonic() - begun, found

    took, [bad] = asyncio.run(run())
    assert took > 1.3 and "--custom-generate-timeout 1.2 s" in bad.grading_error


def test_an_engines_failure_is_the_runs(model: Path) -> None:
    async def run() -> None:
        async with sampler(model, "at_the_engine") as (made, policy):
            policy.broken = PeerError("engine-0 answered a completion without tokens")
            await made.make(asked(model))

    with pytest.raises(PeerError, match="engine-0 answered a completion without tokens"):
        asyncio.run(run())


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
