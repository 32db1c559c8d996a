"""`hpcrl doctor --nodes` on a real Slurm: the short job finds what a run would stumble over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.cluster

SITE = """
time = "1:00:00"
[env]
OMP_NUM_THREADS = "1"
[trainer]
partition = "main"
gpus_per_node = 8
cpus_per_node = 2
[engine]
partition = "main"
gpus_per_node = 8
cpus_per_node = 2
"""
RECIPE = """
actor_num_nodes = 2
actor_num_gpus_per_node = 8
rollout_num_gpus = 8
prompt_data = "prompts.jsonl"
input_key = "prompt"
label_key = "label"
rm_type = "exact"
num_rollout = 1
rollout_batch_size = 8
n_samples_per_prompt = 8
global_batch_size = 64
"""


def doctor(cluster: Cluster, folder: Path, task: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "site.toml").write_text(SITE)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (folder / "recipe.toml").write_text(f'hf_checkpoint = "{task / "model"}"\n{RECIPE}')
    command = [sys.executable, "-m", "hpcrl", "doctor", "recipe.toml", "--site", "./site.toml", "--nodes", *flags]
    return cluster.run([*command, "--run-dir", "runs/a"], cwd=folder, check=False, timeout=240)


def test_a_healthy_cluster_is_well(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    done = doctor(cluster, tmp_path, task, "--interface", "eth0")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "job like this run's",
        "all 3 nodes see one run",
        "the network is eth0",
        "reached from 2 nodes",
        "clocks agree",
        "versions agree: ",
        "node[1-3]: no GPU here",
    ):
        assert any(row.startswith("ok ") and line in row for row in done.stdout.splitlines()), (line, done.stdout)
    assert not list(tmp_path.rglob(".hpcrl-doctor-*")), "its directory is removed"


def test_unseen_directory_and_wrong_network(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """A node that does not see the directory, and a wrong network."""
    runs = tmp_path / "runs"
    runs.mkdir()
    cluster.run(["mount", "-t", "tmpfs", "tmpfs", runs], "node2")
    try:
        done = doctor(cluster, tmp_path, task, "--interface", "ib0", "--set", "launch_timeout=2")
    finally:
        cluster.run(["umount", runs], "node2")
    assert done.returncode == 1, done.stdout
    assert "fail  node2: it does not see" in done.stdout and "system that all nodes" in done.stdout
    assert "no interfaces fit ib0; it has eth0; name the network with --interface" in done.stdout


def test_unsatisfiable_before_submission(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Requests that cannot be satisfied are reported before anything is submitted."""
    cases = [
        ("trainer.partition=absent", "trainer.partition absent: "),
        ("trainer.gpus_per_node=16", "0 of its 4 nodes have that"),
    ]
    cases += [("engine.constraint=absent", "Slurm refuses a job like this run's")]
    for setting, message in cases:
        done = doctor(cluster, tmp_path, task, "--set", setting)
        assert done.returncode == 1 and message in done.stdout, done.stdout
        assert "nodes were not checked" in done.stderr


def test_a_self_test_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks of both nodes make the checks together; what one host alone can check is done on the first."""
    (tmp_path / "site.toml").write_text(SITE + "[rollout]\n")
    command = [
        sys.executable,
        "-m",
        "hpcrl",
        "selftest",
        "--site",
        "./site.toml",
        "--hosts",
        "2",
        "--ranks",
        "1",
        "--dir",
        "st",
    ]
    only = ["--only", "collectives", "bandwidth", "stream_order"]
    done = cluster.run([*command, *only, "--set", "interface=eth0"], cwd=tmp_path, check=False, timeout=240)
    job = tmp_path / "st" / "job.log"
    assert done.returncode == 0, done.stdout + done.stderr + (job.read_text() if job.exists() else "")
    assert "passed   collectives      6 collectives over 2 ranks" in done.stdout
    assert "over 2 ranks of 2 hosts (gloo)" in done.stdout and "2 passed, 0 failed, 1 skipped" in done.stdout
    assert len(json.loads((tmp_path / "st" / "report.json").read_text())["hosts"]) == 2
