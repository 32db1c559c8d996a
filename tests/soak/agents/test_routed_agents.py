"""A mixture of experts with near ties trains on what a custom function of two turns makes, with the engine's experts.

make soak SOAK=routed_agents
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.test_routed_experts import DIFFERENCE, near_ties
from tests.support.runs import POLICY, Run, all_gone, metrics, recipe

pytestmark = [pytest.mark.vllm, pytest.mark.soak]
STEPS = 3


def steps(task: Path, name: str, **own: object) -> dict[int, dict[str, float]]:
    """What a run of three steps has logged."""
    where = task / name
    where.mkdir()
    common = {
        "num_rollout": STEPS,
        "rollout_max_response_len": 64,
        "rollout_max_context_len": 128,
        "max_tokens_per_gpu": 512,
        "bf16": True,
        "deterministic_mode": False,
        "check_weight_update_equal": None,
        "max_logprob_diff": 100.0,
        "lr": 1e-4,
        "run_dir": str(where / "run"),
    }
    begun = Run(recipe(where, task, **(POLICY | common | own)), root=where / "run")
    status, out = begun.end(280)
    assert status == 0, out + begun.logs()
    assert all_gone(where / "run", [])
    found = metrics(where / "run")
    assert list(found) == list(range(STEPS))
    return found


def test_replay_with_a_function_as_without(tmp_path: Path) -> None:
    """The log-prob differences of two turns are those of plain rollouts, and larger without replay."""
    near_ties(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i % 7}="}]} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = {"custom_generate_function_path": "tests.support.own_generates.long_turns", "custom_rm_path": None}
    plain = steps(tmp_path, "plain", use_rollout_routing_replay=True)
    routed = steps(tmp_path, "routed", use_rollout_routing_replay=True, **turns)
    unrouted = steps(tmp_path, "unrouted", **turns)
    print({"plain": plain, "routed": routed, "unrouted": unrouted})
    for step in range(STEPS):
        assert routed[step]["rollout/reward"] == pytest.approx(1.5)
        assert routed[step]["train/routing_changed"] > 0.02
        assert routed[step][DIFFERENCE] < 1.5 * plain[step][DIFFERENCE]
        assert routed[step][DIFFERENCE] < unrouted[step][DIFFERENCE] / 1.3
