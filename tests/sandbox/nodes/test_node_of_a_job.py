"""A job with a component of nodes with sandboxes, one of which is cut off.

Trainers and engine share the nodes of the other component: where one consists of a single node, Slurm queues all of a
heterogeneous job again (26.05.5).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.ledger_account import account
from tests.support.runs import KEPT, metrics, policy, samples
from tests.support.slurm import submit
from tests.whole_runs.test_kept_allocation import find

pytestmark = pytest.mark.cluster
#: responses of a rollout: more than fifty on each of two nodes, and more than one node has at once
GROUPS, EACH = 8, 13
SETTINGS = ("trainer.gpus_per_node=2", "sandbox.mem=4G", "sandbox.cpus_per_node=2")


@pytest.mark.parametrize("rollouts", [2, pytest.param(12, marks=pytest.mark.soak)], ids=["", "a rank dies later"])
def test_a_sandbox_node_is_cut_off(cluster: Cluster, tmp_path: Path, task: Path, rollouts: int) -> None:
    """While fifty sandboxes run on it: the job continues with the other node, every group is trained once and no
    response is graded 0, and nothing is left.  A rank that dies later ends an attempt, and not the job."""
    (held := tmp_path / "held").touch()
    (live := tmp_path / "live").mkdir()
    recipe = policy(
        tmp_path,
        task,
        held_out=False,
        num_rollout=rollouts,
        **KEPT,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=EACH,
        custom_rm_path=None,
        custom_generate_function_path="tests.support.own_generates.graded_in_a_sandbox",
        sandbox_on="nodes",
        sandbox_num_nodes=2,
        max_tokens_per_gpu=2048,
        timeout_factor=0.2,  # a call's limit is 60 s: a hundred sandboxes start at once
    )
    job = submit(cluster, recipe, tmp_path / "run", settings=SETTINGS)
    job.until(lambda: len(list(live.iterdir())) == GROUPS * EACH)
    plan = json.loads((job.root / "attempts/0/plan.json").read_text())
    first, second = (place["host"] for place in plan["sandboxes"])
    others = {place["host"] for place in (*plan["trainers"], *plan["engines"])}
    assert len(others) == 2 and not others & {first, second}
    # of each box its watcher, the program that made it, and its first process
    made = [sum("hpcrl.sandbox." in " ".join(argv) for _, argv in cluster.processes(host)) for host in (first, second)]
    assert min(made) > 50
    cluster.link(second, "down")
    try:
        job.until(lambda: "is lost" in (job.root / "logs/attempt-0/rollout-0.log").read_text(), 60)
    finally:
        held.unlink()
    if rollouts > 2:
        job.until(lambda: job.steps() > 0)
        os.kill(max(find(cluster, "hpcrl.trainer.main")), signal.SIGKILL)
        job.until((job.root / "attempts/1/peers/trainer-0.json").exists)
    job.until((job.root / "summary.json").exists)
    cluster.link(second, "up")  # or else Slurm waits for the node's last word
    cluster.restart_slurmd(second)
    job.ends()
    assert list(metrics(job.root)) == list(range(rollouts)) and cluster.job(job.number)["Restarts"] == "0"
    rewards = [json.loads(line)["reward"] for data in samples(job.root).values() for line in data.splitlines()]
    assert len(rewards) == rollouts * GROUPS * EACH and min(rewards) >= 1
    said = [(job.root / f"logs/attempt-0/sandbox-{index}.log").read_text() for index in (0, 1)]
    assert all("of the kind unshare" in text for text in said) and "sandboxes were used" in said[0]
    found = account(job.root)
    assert (found.following, found.trained, found.wrong) == (rollouts * GROUPS, rollouts * GROUPS, [])
