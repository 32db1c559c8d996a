"""A heterogeneous job of three components: trainer, engine, and nodes with sandboxes, one of which is cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.ledger_account import account
from tests.support.runs import metrics, policy, samples
from tests.support.slurm import submit

pytestmark = pytest.mark.cluster
#: responses of a rollout: more than fifty on each of two nodes, and more than one node has at once
GROUPS, EACH = 8, 13


def test_a_sandbox_node_is_cut_off(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """While fifty sandboxes run on it: the job goes on with the other node, every group is trained once and no response
    is graded 0, and nothing is left."""
    (held := tmp_path / "held").touch()
    (live := tmp_path / "live").mkdir()
    recipe = policy(
        tmp_path,
        task,
        held_out=False,
        actor_num_nodes=1,
        num_rollout=2,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=EACH,
        custom_rm_path=None,
        custom_generate_function_path="tests.support.own_generates.graded_in_a_sandbox",
        sandbox_on="nodes",
        sandbox_num_nodes=2,
        max_tokens_per_gpu=2048,
    )
    job = submit(cluster, recipe, tmp_path / "run", settings=("sandbox.mem=4G", "sandbox.cpus_per_node=2"))
    job.until(lambda: len(list(live.iterdir())) == GROUPS * EACH)
    plan = json.loads((job.root / "attempts/0/plan.json").read_text())
    first, second = (place["host"] for place in plan["sandboxes"])
    assert len({first, second, plan["trainers"][0]["host"], plan["engines"][0]["host"]}) == 4
    forked = [sum("hpcrl.sandbox.spawner" in argv for _, argv in cluster.processes(host)) for host in (first, second)]
    assert min(forked) > 50
    cluster.link(second, "down")
    try:
        job.until(lambda: "is lost" in (job.root / "logs/attempt-0/rollout-0.log").read_text(), 60)
    finally:
        held.unlink()
    job.until((job.root / "summary.json").exists)
    cluster.link(second, "up")  # or else Slurm waits for the node's last word
    cluster.restart_slurmd(second)
    job.ends()
    assert list(metrics(job.root)) == [0, 1] and cluster.job(job.number)["Restarts"] == "0"
    rewards = [json.loads(line)["reward"] for data in samples(job.root).values() for line in data.splitlines()]
    assert len(rewards) == 2 * GROUPS * EACH and min(rewards) >= 1
    found = account(job.root)
    assert (found.following, found.trained, found.wrong) == (2 * GROUPS, 2 * GROUPS, [])
