"""`hpcrl rehearse --on-node` on a real Slurm: a job of one node, whose output and status come through."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import families
from tests.support.cluster import Cluster

pytestmark = pytest.mark.cluster

SITE = """
[trainer]
partition = "main"
gpus_per_node = 8
cpus_per_node = 2
[env]
OMP_NUM_THREADS = "1"
"""
RECIPE = """
loss_type = "sft_loss"
prompt_data = "x.jsonl"
label_key = "label"
num_rollout = 1
bf16 = true
actor_num_gpus_per_node = 1
rollout_num_gpus = 0
rollout_max_response_len = 64
"""


def command(folder: Path) -> list[str | Path]:
    model = families.make(folder / "model", "qwen3", odd=False, vocab_size=256, num_hidden_layers=2)
    (folder / "site.toml").write_text(SITE)
    (folder / "recipe.toml").write_text(f'hf_checkpoint = "{model}"\n{RECIPE}')
    words = [sys.executable, "-m", "hpcrl", "rehearse", "recipe.toml", "--on-node", "--site", "./site.toml"]
    return [*words, "--gpu-memory", "0.5"]


def test_output_and_status_come_through(cluster: Cluster, tmp_path: Path) -> None:
    """From a job of its own, and from a step of the job that it is typed in; a card too small is status 2 there as
    here; nothing is left over (which the fixture looks at)."""
    words = command(tmp_path)
    done = cluster.run(words, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1 of 1 ranks" in done.stdout and "a GPU has 0.5" in done.stderr
    inside = cluster.run(["srun", "--nodes=1", "--ntasks=1", *words, "--ranks", "9"], cwd=tmp_path, check=False)
    assert inside.returncode == 2, inside.stdout + inside.stderr
    assert "--ranks 9" in inside.stderr


def test_a_stop_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C, or SIGTERM: the job is gone when the command is."""
    words = command(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM):
        process = cluster.popen(words, cwd=tmp_path)
        try:
            deadline = time.monotonic() + 60
            while "RUNNING" not in cluster.run(["squeue", "-h", "-o", "%T"]).stdout:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            (own,) = [pid for pid, argv in cluster.processes("head") if "rehearse" in argv and argv[0] != "srun"]
            os.kill(own, number)
            assert process.wait(60) != 0
        finally:
            process.kill()
        assert not cluster.run(["squeue", "-h", "-t", "PENDING,RUNNING"]).stdout.strip(), "it may still be completing"
