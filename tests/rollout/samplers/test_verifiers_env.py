"""An environment of the verifiers package through the adapter: its prompts, and its conversations with exact tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.samplers import verifiers_env
from hpcrl.sample import Sample
from tests.rollout.samplers.test_custom import asked, check, sampler, words
from tests.support.two_ways import make_model

ENVIRONMENT = "tests.support.tiny_verifiers_env"
needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UsageError, match=r"verifiers cannot be imported: .*; pip install 'verifiers>=0.1.10,<0.2'"):
        verifiers_env.Generate()


def test_another_interface_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", sys)
    with pytest.raises(UsageError, match="has another interface"):
        verifiers_env.package()


def test_rows_become_prompts() -> None:
    row = {"prompt": [{"role": "user", "content": "1+1=", "name": None}], "answer": "2", "example_id": 0}
    [line] = verifiers_env.rows("sums", {"a": 1}, [row])
    bare = [{"role": "user", "content": "1+1="}]
    assert line["prompt"] == bare and line["label"] == "2"
    assert line["metadata"]["verifiers"] == {"environment": "sums", "args": {"a": 1}, "input": row | {"prompt": bare}}
    with pytest.raises(DataError, match="row 0.*sums has no chat"):
        list(verifiers_env.rows("sums", {}, [{"question": "?"}]))
    assert verifiers_env.numbers({"a": 1, "b": "x", "c": float("nan")}) == {"a": 1.0}


@needs_the_package
@pytest.mark.process
def test_an_environment_makes_exact_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["x", ENVIRONMENT, "--out", str(tmp_path), "--eval", "1", "--args", '{"questions": 3}']
    )
    assert verifiers_env.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    model = make_model(tmp_path / "model")

    async def run() -> list[Sample]:
        path = "hpcrl.rollout.samplers.verifiers_env.Generate"
        async with sampler(model, "", custom_generate_function_path=path) as (made, _):
            one = asked(model)
            prompt = replace(one.group.prompt, raw=lines[0]["prompt"], metadata=lines[0]["metadata"])
            return await made.make(replace(one, group=replace(one.group, prompt=prompt)))

    [sample] = asyncio.run(run())
    check(sample)
    assert (sample.reward, sample.rewards["says"], sample.grading) == (1.0, 1.0, "")
    told = ["<|user|>", "m", "o", "r", "e", "<|end|>", "<|assistant|>"]
    said = ["a", "b", "<|end|>"]
    from hpcrl.rollout.prompts.tokenizer import Tokenizer

    assert words(Tokenizer(model), sample.array("tokens")[-sample.response_length :]) == [*said, *told, *said]
