"""A whole run with functions as slime's users write them: the trainer finds the log-probs that they bring back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import POLICY, Run, all_gone, metrics, recipe

pytestmark = pytest.mark.vllm
HERE = "tests.support.own_slimes"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """Two steps in which every function makes some of the groups, with a reward and a filter of slime's."""
    path = tmp_path_factory.mktemp("slimes")
    own = {
        "num_rollout": 2,
        "custom_generate_function_path": f"{HERE}.in_turn",
        "custom_rm_path": f"{HERE}.reward",
        "rollout_sample_filter_path": f"{HERE}.remove_truncated",
        "reward_key": "score",
        "run_dir": str(path / "run"),
    }
    begun = Run(recipe(path, task, **(POLICY | own)), root=path / "run")
    status, out = begun.end()
    assert status == 0, out + begun.logs()
    assert all_gone(path / "run", [])
    return path / "run"


def test_the_trainer_finds_the_same_log_probs(run: Path) -> None:
    """Tokens, mask and log-probs of every function are those of the engine: the trainer computes the same."""
    steps = metrics(run)
    assert list(steps) == [0, 1]
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert row["staleness/max"] == 0


def sample_rows(run: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted((run / "samples").glob("*")):
        if file.suffix == ".jsonl":
            found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def test_no_call_failed(run: Path) -> None:
    rows = sample_rows(run)
    assert rows and not [row for row in rows if row.get("grading_error")]
