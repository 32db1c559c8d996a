"""docs/models.md as printed: an adapter is trained, resumed, written as PEFT writes it, and merged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import REPO

pytestmark = pytest.mark.vllm


def hpcrl(*words: object, seconds: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hpcrl", *map(str, words)],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_an_adapter_from_run_to_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    check = ["--check-weight-update-equal", "--num-rollout", 4, "--save-interval", 2]
    hpcrl("run", "examples/recipes/lora.toml", "--run-dir", run, *check)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["policy_version"] for row in steps] == [1, 2, 3, 4]
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in steps) < 2e-5
    assert steps[0]["train/kl_loss"] < 1e-9 < steps[-1]["train/kl_loss"]
    hpcrl("resume", run, "--num-rollout", 5)
    hpcrl("convert", "to-hf", run, "--output-dir", tmp_path / "adapter")
    hpcrl(
        "convert",
        "merge-lora",
        "--adapter-dir",
        tmp_path / "adapter",
        "--base-dir",
        run / "prepared/model",
        "--output-dir",
        tmp_path / "m",
    )
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {row["perf/update_weights_bytes"] for row in steps} == {sum(4 * t.numel() for t in adapter.values())}
    base, merged = (load_file(place / "model.safetensors") for place in (run / "prepared/model", tmp_path / "m"))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}
