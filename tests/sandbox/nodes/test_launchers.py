"""Nodes with sandboxes that are no component of their own: those of an ordinary Slurm job, and of a hostfile."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import KEPT, POLICY, SFT, metrics, policy, recipe, samples
from tests.support.slurm import Job, submit
from tests.whole_runs.test_under_mpirun import launch

pytestmark = pytest.mark.cluster
RESPONSES = 2 * 4 * 2  #: of two rollouts
#: trainer and engine share a node
SMALL = {
    "num_rollout": 2,
    "actor_num_nodes": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "custom_rm_path": None,
    "custom_generate_function_path": "tests.support.own_generates.graded_in_a_sandbox",
    "sandbox_on": "nodes",
    "sandbox_num_nodes": 2,
    "save_interval": None,
}


def two_stages(path: Path, task: Path, **values: object) -> Path:
    """Fine-tuning, which needs no sandboxes, and then SMALL; with a task, or an MPI rank, for each slot of a host."""
    file = recipe(path, task)
    stages = {"first": SFT | {"num_rollout": 1}, "second": POLICY | SMALL | values}
    with file.open("a") as out:
        for name, own in stages.items():
            rows = {"name": name} | {key: value for key, value in own.items() if value is not None}
            out.write("[[stage]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items()))
    return file


def nodes_of(root: Path) -> list[str]:
    """The nodes with sandboxes of a run; they are two, on which nothing else is."""
    plan = json.loads((root / "attempts/0/plan.json").read_text())
    nodes = [place["host"] for place in plan["sandboxes"]]
    others = {place["host"] for place in (*plan["trainers"], *plan["engines"], plan["rollout"])}
    assert len(set(nodes)) == 2 and not others & set(nodes)
    return nodes


def submit_ordinary(cluster: Cluster, recipe: Path, root: Path) -> Job:
    return submit(cluster, recipe, root, "--layout", "homogeneous", settings=("trainer.gpus_per_node=2",))


def check_responses(root: Path) -> None:
    """Each is graded by a box, and both nodes gave some."""
    nodes_of(root)
    said = "".join(path.read_text() for path in (root / "logs/attempt-0").glob("sandbox-*.log"))
    counts = [int(count) for count in re.findall(r"(\d+) sandboxes were used, 0 lost", said)]
    rewards = [json.loads(line)["reward"] for data in samples(root).values() for line in data.splitlines()]
    assert min(counts) > 0 and sum(counts) == RESPONSES, said
    assert len(rewards) == RESPONSES and min(rewards) >= 1 and list(metrics(root)) == [0, 1]


def test_ordinary_slurm_job(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Slurm gives three nodes of one kind, with two tasks each; the last two serve sandboxes alone, once each."""
    job = submit_ordinary(cluster, two_stages(tmp_path, task), tmp_path / "run")
    job.ends()
    assert cluster.job(job.number)["NumNodes"] == "3"
    check_responses(job.root / "second")


def test_hostfile_under_mpirun(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Its last hosts in their order: one that has slots and is free, and one without."""
    (hosts := tmp_path / "hosts").write_text("node4 slots=2\nnode2 slots=2\nnode3 slots=0\n")
    launch(cluster, "openmpi", hosts, two_stages(tmp_path, task), "--run-dir", root := tmp_path / "run")
    check_responses(root / "second")
    assert nodes_of(root / "second") == ["node2", "node3"]
    first = json.loads((root / "first/attempts/0/plan.json").read_text())
    assert first["rollout"]["host"] == "node4" and not first["sandboxes"]


@pytest.mark.soak
def test_ordinary_slurm_job_loses_one(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """It continues with the other, and is not queued again."""
    (held := tmp_path / "held").touch()
    (live := tmp_path / "live").mkdir()
    job = submit_ordinary(cluster, policy(tmp_path, task, held_out=False, **SMALL), tmp_path / "run")
    job.until(lambda: len(list(live.iterdir())) == RESPONSES // 2)
    second = nodes_of(job.root)[1]
    cluster.link(second, "down")
    try:
        job.until(lambda: "is lost" in (job.root / "logs/attempt-0/rollout-0.log").read_text(), 60)
    finally:
        held.unlink()
    job.until((job.root / "summary.json").exists)
    cluster.link(second, "up")  # or else Slurm waits for the node's last word
    cluster.restart_slurmd(second)
    job.ends()
    rewards = [json.loads(line)["reward"] for data in samples(job.root).values() for line in data.splitlines()]
    assert len(rewards) == RESPONSES and min(rewards) >= 1 and list(metrics(job.root)) == [0, 1]
    assert cluster.job(job.number)["Restarts"] == "0"


@pytest.mark.soak
def test_sandboxes_of_engines_move(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """The only node with an engine loses its power while its sandboxes are in use: a spare host takes its place, and
    has them too."""
    (held := tmp_path / "held").touch()
    (live := tmp_path / "live").mkdir()
    own = SMALL | KEPT | {"sandbox_on": "engines", "sandbox_num_nodes": None, "spares": 1, "hang_timeout": 15}
    file = policy(tmp_path, task, held_out=False, **own)
    words = ("--layout", "homogeneous")
    job = submit(cluster, file, tmp_path / "run", *words, settings=("trainer.gpus_per_node=1",))
    job.until(lambda: len(list(live.iterdir())) == RESPONSES // 2)
    places = [json.loads((job.root / "attempts/0/plan.json").read_text())["sandboxes"][0]["host"]]
    cluster.kill_node(places[0])
    job.until((job.root / "attempts/1/plan.json").exists, 120)
    held.unlink()
    cluster.boot_node(places[0])
    places += [json.loads((job.root / "attempts/1/plan.json").read_text())["sandboxes"][0]["host"]]
    job.ends()
    rewards = [json.loads(line)["reward"] for data in samples(job.root).values() for line in data.splitlines()]
    assert len(set(places)) == 2 and cluster.job(job.number)["Restarts"] == "0"
    assert len(rewards) == RESPONSES and min(rewards) >= 1 and list(metrics(job.root)) == [0, 1]
