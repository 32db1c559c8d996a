"""slime's examples run unmodified from a checkout, and what the engines sampled is what is trained on.

SLIME_CHECKOUT=/path/to/slime make soak SOAK=slimes_examples
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rollout.samplers.sampled_tokens import UNSAMPLED
from tests.support.runs import POLICY, Run, all_gone, metrics, recipe
from tests.support.tiny import make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.skipif("SLIME_CHECKOUT" not in os.environ, reason="SLIME_CHECKOUT names no checkout of slime's"),
]
HERE = "tests.support.slimes_examples"
COUNT = 5  #: examples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, in which each example makes two groups of a step."""
    path = tmp_path_factory.mktemp("examples")
    make_model(path / "model", vocab_size=104, max_position_embeddings=4096)
    rows = [{"prompt": f"{number}+4=", "label": str(number + 4)} for number in range(4 * COUNT)]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "num_rollout": 2,
        "rollout_batch_size": 2 * COUNT,
        "n_samples_per_prompt": 2,
        "rollout_shuffle": False,
        "label_key": "label",
        "apply_chat_template": False,
        "rollout_max_response_len": 12,
        "rollout_max_context_len": 2048,
        "max_tokens_per_gpu": 4096,
        "custom_generate_function_path": f"{HERE}.generate",
        "custom_rm_path": f"{HERE}.reward",
        "run_dir": str(path / "run"),
    }
    begun = Run(recipe(path, path, **(POLICY | own)), root=path / "run")
    status, out = begun.end(560)
    assert status == 0, out + begun.logs()
    assert all_gone(path / "run", [])
    return path / "run"


def sample_rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "samples").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_example_makes_its_responses(run: Path) -> None:
    rows = sample_rows(run)
    assert not [row["grading_error"] for row in rows if row.get("grading_error")]
    assert {row["group"] % COUNT for row in rows} == set(range(COUNT))


def test_what_was_sampled_is_trained(run: Path) -> None:
    """The trainer finds the log-probs of the engines; tokens that none sampled are those of tau-bench alone, which
    encodes text again."""
    steps = metrics(run)
    assert list(steps) == [0, 1]
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in steps.values())
    lost = {row["group"] % COUNT for row in sample_rows(run) if row["metadata"].get(UNSAMPLED)}
    assert lost <= {2}
