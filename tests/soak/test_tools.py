"""A tiny model learns a tool over two turns, a calculator or a shell in a sandbox: the reward rises, held out too, and the
tool's tokens are not learned from.  SEED names the shell's seeds, with commas between."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.runs import REPO, Run, all_gone

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SEEDS = (os.environ.get("SEED") or "1,7,1234").split(",")


@pytest.mark.parametrize(("tool", "seed"), [("calculator", "1234"), *(("shell", seed) for seed in SEEDS)])
def test_a_tool_is_asked_instead_of_guessing(tool: str, seed: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(REPO / "examples" / "tools" / f"{tool}.toml", "--run-dir", root, "--seed", seed, root=root)
    status, out = run.end(900)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    before, after = (
        float(x) for x in re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)  .*", out.splitlines()[-1]).groups()
    )
    assert 0.2 <= before <= 0.6 and after >= before + 0.25
    found = {}
    for line in (root / "grpo" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["rollout_id"], {}).update(row)
    last = max(step for step, row in found.items() if "rollout/reward" in row)
    assert found[last]["rollout/reward"] >= found[0]["rollout/reward"] + 0.25
    samples = [json.loads(line) for line in (root / "grpo" / "samples" / f"{last:08d}.jsonl").read_text().splitlines()]
    calling = [row for row in samples if "<call>" in row["response"] and "<|tool|>" in row["response"]]
    assert len(calling) > len(samples) / 2
    # one character a token: <|end|><|tool|>...<|end|><|assistant|> is the tool's, but for the first, with which the
    # policy ends its turn
    told = sum(
        len(value) + 3 for row in calling for value in re.findall(r"<\|tool\|>([^<]*)<\|end\|>", row["response"])
    )
    assert found[last]["perf/train_tokens"] == sum(row["response_len"] for row in samples) - told
