"""Both sets of tasks in examples/tasks are learned: the reward rises, held out too, and what the shell said is not
learned from.  SEED names the seeds, with commas between."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.runs import REPO, Run, all_gone

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SEEDS = (os.environ.get("SEED") or "1,7,1234").split(",")
LOOKS = {"terminal": "cat f", "repository": "python3 t.py"}  #: how a policy finds out what is to be written
#: what is one token, as every other character is: a call's begin and end, and what the model has no word for
ONE_TOKEN = re.compile(r'<tool_call>\{"name": "bash", "arguments": \{"command": "|"\}\}</tool_call>|<\|unk\|>')


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tasks", ["terminal", "repository"])
def test_tasks_are_learned(tasks: str, seed: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(REPO / "examples" / "tasks" / f"{tasks}.toml", "--run-dir", root, "--seed", seed, root=root)
    status, out = run.end(1500)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    before, after = (
        float(x) for x in re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)  .*", out.splitlines()[-1]).groups()
    )
    assert 0.2 <= before <= 0.7 and after >= before + 0.15, (before, after)
    found = {}
    for line in (root / "grpo" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["rollout_id"], {}).update(row)
    last = max(step for step, row in found.items() if "rollout/reward" in row)
    assert found[last]["rollout/reward"] >= found[0]["rollout/reward"] + 0.15
    samples = [json.loads(line) for line in (root / "grpo" / "samples" / f"{last:08d}.jsonl").read_text().splitlines()]
    looking = [row for row in samples if f'"command": "{LOOKS[tasks]}' in row["response"]]
    assert len(looking) > 0.8 * len(samples)
    # <|end|><|tool|>...<|end|><|assistant|> is the shell's, but for the first, with which the policy ends its turn; what
    # it says at the end of a response, with no turn behind it, is left out
    told = sum(
        len(text) + 3
        for row in samples
        for text in re.findall(r"<\|tool\|>([^<]*)<\|end\|><\|assistant\|>", ONE_TOKEN.sub("#", row["response"]))
    )
    assert found[last]["perf/train_tokens"] == sum(row["response_len"] for row in samples) - told
