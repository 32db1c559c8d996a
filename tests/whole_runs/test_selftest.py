"""`hpcrl selftest` on the CPU: every check for real, in one command, as a user starts it; and what it knows when asked
again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.doctor.selftest.first_hour import GROUPS
from tests.support.runs import REPO

pytestmark = pytest.mark.vllm


def selftest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpcrl", "selftest", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=560, check=False)


@pytest.mark.timeout(900)
def test_every_check_passes_here(tmp_path: Path) -> None:
    """Every check passes on this machine and is not repeated: those of the first hour, then the others."""
    done = selftest(tmp_path, "--first-hour", "--dir", "st", "--json", "sent.json")
    assert done.returncode == 0 and "hpcrl: 0 GPUs: one, moe-fp8" in done.stdout, done.stdout + done.stderr
    sent = json.loads((tmp_path / "sent.json").read_text())
    made = {name for name, check in sent["checks"].items() if check["result"] != "not run"}
    assert (
        made == {*GROUPS["one"], *GROUPS["moe-fp8"]} and {"torch", "vllm", "megatron-core"} <= sent["packages"].keys()
    )
    rates = sent["checks"]["qwen3_rates"]["numbers"]
    assert rates["qwen3_4b_lora_published"] == 6229 and rates["qwen3_4b_lora_tokens_per_second_per_gpu"] > 0
    assert rates["qwen3_0.6b_published"] == 11896 and rates["qwen3_0.6b_sampled_tokens_per_second"] > 0
    assert "Using CPUUnquantizedExperts MoE backend" in sent["kernels"]["moe-fp8-no"]
    assert any(line.startswith("runs on the CPU: layers") for line in sent["kernels"]["qwen3_4b_lora"])
    done = selftest(tmp_path, "--resume", "st", "--json", "found.json")
    assert done.returncode == 0 and "qwen3_rates is known already" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert found["stream_order"]["text"].startswith("no GPU: ")
    assert found["ipc"]["text"].startswith("no GPU: ")
    assert found["sleep_wake"]["text"].startswith("vLLM's CPU build")
    skipped = {"environment", "stream_order", "ipc", "sleep_wake"}
    assert {name: check["result"] for name, check in found.items()} == {
        name: "skipped" if name in skipped else "passed" for name in found
    }
    assert found["engine_update"]["numbers"]["updates"] == 3 and found["save_resume"]["numbers"]["stopped_after"] >= 1
    assert found["collectives"]["numbers"]["ranks"] == 2
