"""Held-out samples that a function of the user's makes: what it gets, what it may return, and what is logged of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.report.timeline.spans import Timeline
from hpcrl.rollout.custom_hooks import RolloutHooks
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.evaluation.custom_evaluator import CustomEvaluator, Evaluated
from hpcrl.rollout.evaluation.evaluation_service import EvaluationService
from hpcrl.rollout.evaluation.evaluator import Evaluator, HeldOut, read_held_out
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import SingleTurnSampler
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED
from tests.support.options import GRPO
from tests.support.tiny import make_tokenizer

HERE = "tests.rollout.evaluation.test_custom_evaluator"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"vocab_size": 128, "max_position_embeddings": 2048, "eos_token_id": 1})
    )
    return Tokenizer(path)


class Engines:
    """In the place of the engines: a response of two tokens, which are the last of the prompt and of the seed."""

    async def complete(self, prompt: np.ndarray, sampling: Any, seed: int | None, version: int, **_: Any) -> Completion:
        await asyncio.sleep(0)
        tokens = np.asarray([prompt[-1], 10 + (seed or 0) % 50], np.int32)
        return Completion(tokens, np.full(2, -0.5, np.float32), np.full(2, version, np.int32), COMPLETED)


class Grades:
    """In the place of the grading processes: 1 if the second token is even."""

    def tally(self, what: str, size: int, each: int) -> None:
        return None

    async def grade(self, sample: Sample, where: str, tally: None, by: Any) -> None:
        sample.reward = float(sample.array("tokens")[-1] % 2)


async def usual(options: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:
    assert evaluation and rollout_id == 3
    found = {}
    for name in reversed(data_source.names):
        groups = await data_source.get_samples(name)
        assert all(sample.status == "pending" for group in groups for sample in group)
        done = await asyncio.gather(*(data_source.generate_group(group) for group in groups))
        assert await data_source.generate(done[0][0]) == [done[0][0]]
        found[name] = done[::-1]
    return found


async def slimes(options: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = (await usual(options, rollout_id, data_source, evaluation=evaluation))["a"]
    flat = [sample for group in groups for sample in group]
    data = {
        "a": {"rewards": [0.25] * len(flat), "truncated": [False] * len(flat), "samples": flat},
        "b": {"rewards": [1.0, 0.0, 1.0, 1.0], "truncated": [True, False, False, False]},
        "other": {"accuracy": 0.5, "solved": 3},
    }
    return SimpleNamespace(data=data, metrics={"eval/a/mine": 7, "b/more": 1.5})


def plain(options: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    return {name: {"accuracy": 0.125} for name in data_source.names}


async def spoilt(options: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:
    """As --name says."""
    found = await usual(options, rollout_id, data_source, evaluation=True)
    one = found["a"][0][0]
    rest = [*found["a"][0][1:], *found["a"][1:]]
    changes: dict[str, Any] = {
        "nothing": lambda: None,
        "set": lambda: {"a": found["a"]},
        "list": lambda: found["a"],
        "few": lambda: found | {"a": found["a"][1:]},
        "twice": lambda: found | {"a": [*rest, one, one]},
        "pending": lambda: found | {"a": [*rest, one.replace(status="pending")]},
        "nan": lambda: found | {"a": [*rest, one.replace(reward=float("nan"))]},
        "strange": lambda: found | {"a": found["b"]},
        "unknown": lambda: found | {"c": found["b"]},
        "number": lambda: found | {"a": {"accuracy": "high"}},
        "none": lambda: found | {"a": {}},
        "rewards": lambda: found | {"a": {"rewards": [1.0, float("inf")]}},
        "beside": lambda: found | {"a": {"rewards": [1.0], "samples": found["a"]}},
        "metrics": lambda: SimpleNamespace(data=found, metrics={"solved": 1.0}),
        "raises": lambda: one.nothing,
    }
    return changes[options.name]()


async def of_no_set(options: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:
    return await data_source.get_samples("c")


def attempt(
    path: Path, tokenizer: Tokenizer, function: str, **values: Any
) -> tuple[CustomEvaluator, Evaluator, list[HeldOut]]:
    words = []
    for name, count in (("a", 3), ("b", 2)):
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"input": f"{name}{n}", "label": n}) + "\n" for n in range(count))
        )
        words += [name, str(path / f"{name}.jsonl")]
    base = {
        "eval_interval": 1,
        "eval_prompt_data": words,
        "n_samples_per_eval_prompt": 2,
        "rm_type": "math",
        "label_key": "label",
    }
    options = Options(**(base | {"eval_function_path": f"{HERE}.{function}"} | values))
    held = read_held_out(options, tokenizer)
    sampler = SingleTurnSampler(options, tokenizer, Engines(), Grades())  # type: ignore[arg-type]
    evaluator = Evaluator(options, tokenizer, sampler)
    return (
        CustomEvaluator(options, evaluator, held, load_own("eval_function_path", f"{HERE}.{function}")),
        evaluator,
        held,
    )


def told(samples: list[Sample]) -> list[Any]:
    return [(s.group_index, s.response_index, s.array("tokens").tolist(), s.reward, s.response) for s in samples]


def test_the_usual_way_gives_the_usual_samples(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def run() -> None:
        own, evaluator, sets = attempt(tmp_path, tokenizer, "usual")
        made = await own.make(3, 5)
        assert made.numbers == {} and made.samples.keys() == {"a", "b"}
        for held in sets:
            usually = await evaluator.samples(held, 5)
            assert told(made.samples[held.name]) == told(usually) and len(usually) == 2 * len(held.file)
            assert held.results(made.samples[held.name], True) == held.results(usually, True)

    asyncio.run(run())


def test_slimes_forms_and_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = asyncio.run(attempt(tmp_path, tokenizer, "slimes")[0].make(3, 5))
    assert [sample.reward for sample in made.samples["a"]] == [0.25] * 6 and made.samples.keys() == {"a"}
    assert made.numbers == {
        "a": {"mine": 7.0},
        "b": {"accuracy": 0.75, "right_or_wrong": 1.0, "n": 4.0, "truncated_ratio": 0.25, "more": 1.5},
        "other": {"accuracy": 0.5, "solved": 3.0},
    }
    assert asyncio.run(attempt(tmp_path, tokenizer, "plain")[0].make(3, 5)) == Evaluated(
        {}, {"a": {"accuracy": 0.125}, "b": {"accuracy": 0.125}}
    )


def test_what_is_logged_of_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The part of the rollout process that makes an evaluation's answer, without the rest of it."""

    async def connected() -> None: ...

    own, evaluator, sets = attempt(tmp_path, tokenizer, "slimes")
    hooks = RolloutHooks(Options(), {})
    work = SimpleNamespace(held_out=sets, hooks=hooks)
    role = SimpleNamespace(
        _pool=SimpleNamespace(connect=connected),
        _own=own,
        _timeline=Timeline(None),
        _evaluator=evaluator,
        _options=Options(),
        _work=work,
        _samples=tmp_path,
    )
    found = asyncio.run(EvaluationService.make(role, 3, 5))  # type: ignore[arg-type]
    assert (found["a"]["accuracy"], found["a"]["n"], found["a"]["mine"]) == (0.25, 6, 7.0) and "ci_low" in found["a"]
    assert found["b"]["accuracy"] == 0.75 and found["other"] == {"accuracy": 0.5, "solved": 3.0}
    rows = [json.loads(line) for line in (tmp_path / "eval-a-3.jsonl").read_text().splitlines()]
    assert [row["group"] for row in rows] == [0, 0, 1, 1, 2, 2] and not (tmp_path / "eval-b-3.jsonl").exists()
    role._own = None
    usually = asyncio.run(EvaluationService.make(role, 3, 5))  # type: ignore[arg-type]
    assert usually.keys() == {"a", "b"} and "mine" not in usually["a"]
    beside = asyncio.run(EvaluationService.make(role, 3, 5, while_training=True))  # type: ignore[arg-type]
    assert beside["a"] == usually["a"] | {"policy_version": 5, "policy_version_max": 5, "policy_version_ratio": 1}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nothing", "numbers by the name"),
        ("list", "numbers by the name"),
        ("set", "set b; it returned"),
        ("few", "2 to each of its 3 prompts are expected"),
        ("twice", "returned response 0 of group 2 (a) twice"),
        ("pending", "status=pending, response_length=2) (a): it must"),
        ("nan", "the reward to nan"),
        ("strange", "returned no sample"),
        ("unknown", "returned samples of c"),
        ("number", "metric 'accuracy', returned 'high'"),
        ("none", "returned no number"),
        ("rewards", "set a, returned [1.0, inf]"),
        ("beside", "set a, returned 1 rewards for 6"),
        ("metrics", "metric 'solved', expected SET/NAME"),
        ("raises", "raised AttributeError: 'Sample' object"),
    ],
)
def test_what_it_returns_is_checked(tmp_path: Path, tokenizer: Tokenizer, how: str, words: str) -> None:
    with pytest.raises(HpcrlError) as caught:
        asyncio.run(attempt(tmp_path, tokenizer, "spoilt", name=how)[0].make(3, 0))
    assert words in str(caught.value) and str(caught.value).startswith(f"--eval-function-path {HERE}.spoilt")


def test_what_it_asks_for_is_checked(tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HpcrlError, match=r"raised ValueError: get_samples\('c'\): there are the sets"):
        asyncio.run(attempt(tmp_path, tokenizer, "of_no_set")[0].make(3, 0))
    assert "in of_no_set" in capfd.readouterr().err, "the traceback is in the log"


def test_without_an_evaluation_it_has_no_effect() -> None:
    with pytest.raises(UsageError, match="--eval-function-path has no effect here: --eval-interval is not given"):
        check_options(Options(**GRPO, eval_function_path="m.f"))
