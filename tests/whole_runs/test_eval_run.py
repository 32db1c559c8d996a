"""`hpcrl eval` of a model directory: trainer, engine and two held-out sets, each sampled and graded as its YAML
says."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPO, all_gone, rows, samples

pytestmark = pytest.mark.vllm

YAML = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, max_response_len: 6, input_key: prompt, label_key: label, apply_chat_template: true}
  datasets:
    - {name: sampled, path: PATH, custom_rm_path: tests.support.runs.odd_tokens, top_p: 0.9}
    - {name: greedy, path: "PATH@[1:4]", rm_type: random, temperature: 0, n_samples_per_eval_prompt: 2, metadata_overrides: {a: 1}}
"""


def as_parquet(path: Path, task: Path) -> Path:
    """The held-out prompts as parquet where pyarrow is installed, else as they are."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        return task / "heldout.jsonl"
    lines = [json.loads(line) for line in (task / "heldout.jsonl").read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(lines), path / "heldout.parquet")
    return path / "heldout.parquet"


def test_a_model_is_evaluated_by_a_run_of_its_own(tmp_path: Path, task: Path) -> None:
    (tmp_path / "eval.yaml").write_text(YAML.replace("PATH", str(as_parquet(tmp_path, task))))
    flags = "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-max-context-len 64 --no-bf16 --log-passrate"
    command = [sys.executable, "-m", "hpcrl", "eval", str(task / "model"), *flags.split()]
    command += ["--eval-config", str(tmp_path / "eval.yaml"), "--run-dir", str(tmp_path / "run")]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / "run" / "logs").glob("*/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert all_gone(tmp_path / "run", [])
    assert not list((tmp_path / "run" / "checkpoints").glob("iter_*")), "nothing was trained, nothing is saved"
    files = {name: [json.loads(line) for line in text.splitlines()] for name, text in samples(tmp_path / "run").items()}
    sampled = files["eval-sampled--1.jsonl"]
    greedy = files["eval-greedy--1.jsonl"]
    assert (len(files), len(sampled), len(greedy)) == (2, 24, 6)
    assert [row["prompt"] for row in greedy[::2]] == [row["prompt"] for row in sampled[4:16:4]], "rows 1 to 3"
    assert all(
        a["response"] == b["response"] and a["metadata"] == {"a": 1}
        for a, b in zip(greedy[::2], greedy[1::2], strict=True)
    )
    assert max(row["response_len"] for row in sampled) <= 6 and len({row["response"] for row in sampled}) > 6
    (row,) = [row for row in rows(tmp_path / "run") if "eval/sampled/accuracy" in row]
    assert math.isclose(row["eval/sampled/accuracy"], sum(one["reward"] for one in sampled) / 24)
    assert row["eval/sampled/ci_low"] < row["eval/sampled/accuracy"] < row["eval/sampled/ci_high"]
    assert {"eval/sampled/pass@4", "eval/greedy/pass@2"} <= row.keys() and row["rollout_id"] == -1
    assert re.search(r"^sampled: 0\.\d{3} \(0\.\d{3} to 0\.\d{3}\), pass@1 .*, 24 responses$", done.stdout, re.M), (
        done.stdout
    )
