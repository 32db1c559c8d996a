"""A taskset of verifiers 0.4 through the adapter: its prompts, and what its agent does in a sandbox with exact tokens.

The package is not among those of `make env`: it wants an older `openai` than vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.errors import UsageError
from hpcrl.rollout.samplers import verifiers_tasks
from hpcrl.sample import Sample
from tests.rollout.samplers.test_custom import asked, check, sampler
from tests.support.two_ways import make_model

SUPPORT = Path(__file__).parents[2] / "support"
TASKSET = "tiny_verifiers_taskset"
needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None,
    reason="verifiers 0.4 is not installed",
)


def test_what_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package, and one of another interface."""
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UsageError, match="verifiers 0.4 cannot be imported"):
        verifiers_tasks.package()
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(v1=sys))
    monkeypatch.setitem(sys.modules, "verifiers.v1", sys)
    with pytest.raises(UsageError, match="has another interface"):
        verifiers_tasks.package()


@needs_the_package
@pytest.mark.process
def test_a_taskset_makes_exact_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent asks at the endpoint; what grades it runs in the sandbox; without a shell and with one."""
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(sys, "argv", ["x", TASKSET, "--out", str(tmp_path), "--eval", "1"])
    assert verifiers_tasks.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == ["2+1=", "3+1="]
    model = make_model(tmp_path / "model")

    async def run(shell: bool) -> list[Sample]:
        path = "hpcrl.rollout.samplers.verifiers_tasks.generate"
        async with sampler(model, "", custom_generate_function_path=path) as (made, _):
            one = asked(model)
            metadata = {verifiers_tasks.KEY: lines[0]["metadata"][verifiers_tasks.KEY] | {"shell": shell}}
            prompt = replace(one.group.prompt, raw=lines[0]["prompt"], metadata=metadata)
            return await made.make(replace(one, group=replace(one.group, prompt=prompt)))

    for shell in (False, True):
        [sample] = asyncio.run(run(shell))
        check(sample)
        assert (sample.reward, sample.rewards["length"], sample.grading) == (1.0, 1.0, ""), sample.grading_error
