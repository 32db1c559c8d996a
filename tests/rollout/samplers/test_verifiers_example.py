"""The example of a taskset of verifiers 0.4: its prompts, and what its agent does in a sandbox with exact tokens.

The package is not among those of `make env`: it wants an older `openai` than vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.sample import Sample
from tests.rollout.samplers.test_custom import asked, check, sampler
from tests.support.two_ways import make_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers"
SUPPORT = Path(__file__).parents[2] / "support"
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None,
        reason="verifiers 0.4 is not installed",
    ),
]


def test_a_taskset_makes_exact_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent asks at the endpoint; what grades it runs in the sandbox; without a shell and with one."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(EXAMPLE), os.environ.get("PYTHONPATH", "")]))
    words = [sys.executable, EXAMPLE / "taskset.py", "tiny_verifiers_taskset"]
    printed = subprocess.run(words, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["prompt"][0]["content"] for line in lines] == ["1+1=", "2+1=", "3+1="]
    model = make_model(tmp_path / "model")

    async def run(shell: bool) -> list[Sample]:
        async with sampler(model, "", custom_generate_function_path="taskset.generate") as (made, _):
            one = asked(model)
            metadata = {"verifiers": lines[0]["metadata"]["verifiers"] | {"shell": shell}}
            prompt = replace(one.group.prompt, raw=lines[0]["prompt"], metadata=metadata)
            return await made.make(replace(one, group=replace(one.group, prompt=prompt)))

    for shell in (False, True):
        [sample] = asyncio.run(run(shell))
        check(sample)
        assert (sample.reward, sample.rewards["length"], sample.grading) == (1.0, 1.0, ""), sample.grading_error
