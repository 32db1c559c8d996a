"""`hpcrl rehearse`: the whole way, from a recipe to the table, and to the error that names flag and rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from tests.support import families

pytestmark = pytest.mark.process


def recipe(directory: Path, more: str = "") -> str:
    model = families.make(directory / "model", "qwen3", odd=False, vocab_size=256, num_hidden_layers=2)
    path = directory / "r.toml"
    path.write_text(
        f'hf_checkpoint = "{model}"\nprompt_data = "x.jsonl"\nlabel_key = "l"\nrm_type = "math"\nnum_rollout = 1\n'
        "bf16 = true\nn_samples_per_prompt = 2\nactor_num_gpus_per_node = 2\nrollout_num_gpus = 2\n"
        f"tensor_model_parallel_size = 2\nsequence_parallel = true\nrollout_max_response_len = 64\n{more}"
    )
    return str(path)


def test_a_recipe_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks, and the table; a card too small is an error that says what would fit."""
    path = recipe(tmp_path)
    assert main(["rehearse", path, "--gpu-memory", "0.5", "--vllm-max-num-seqs", "9000"]) == 2
    told = capsys.readouterr()
    assert "2 of 2 ranks" in told.out and "forward and backward" in told.out
    assert "reduce_scatter" in told.out
    assert "rank 0 of stage 0" in told.err and "a GPU has 0.5" in told.err
    assert "vLLM refuses" in told.err and "--vllm-max-num-seqs 9000" in told.err


def test_what_a_rank_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only the trainer can refuse is told for the rank that met it."""
    words = ["--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "4"]
    words += ["--pipeline-model-parallel-layout", "Ett|tL"]  # of three layers, and the model has two
    assert main(["rehearse", recipe(tmp_path), "--ranks", "1", *words]) == 2
    told = capsys.readouterr()
    assert "rank 1" in told.err and "num_layers" in told.err


def test_words_that_are_none_of_its(tmp_path: Path) -> None:
    """Neither two recipes nor ranks that there are not."""
    assert main(["rehearse"]) == 2
    assert main(["rehearse", recipe(tmp_path), "--ranks", "7"]) == 2
    assert main(["rehearse", recipe(tmp_path), "--at-once", "0"]) == 2
