"""Convert, train, export as three jobs of the test cluster, each waiting for the one before."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cluster import Cluster
from tests.support.runs import REPO, SFT, metrics, recipe
from tests.support.slurm import ENV, MEMORY

pytestmark = [pytest.mark.soak, pytest.mark.cluster]


def test_a_model_goes_through_the_chain(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Two ranks on two nodes convert, a run begins with what they wrote, and its last checkpoint becomes a model
    again."""
    (tmp_path / "tools").symlink_to(REPO / "tools")
    told = {
        "MODEL": str(task / "model"),
        "SAVE": str(tmp_path / "torch_dist"),
        "RUN": str(tmp_path / "run"),
        "NODES": "2",
        "RANKS": "1",
        "HPCRL_PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SBATCH_MEM_PER_NODE": "8G",  # the nodes are small
        "SBATCH_CPUS_PER_TASK": "1",
    }
    values = SFT | {"num_rollout": 3, "actor_num_gpus_per_node": 1}
    command = ["bash", REPO / "sbatch" / "chain.sh", recipe(tmp_path, task, **values), "--set", *MEMORY]
    said = cluster.run(command, env=ENV | told, cwd=tmp_path).stdout
    jobs = dict(re.findall(r"(\w+): +job (\d+)", said))
    assert list(jobs) == ["convert", "train", "export"], said
    for job in jobs.values():
        cluster.wait_state(int(job), "COMPLETED", 240)
    assert list(metrics(tmp_path / "run")) == [0, 1, 2]
    log = "".join(path.read_text() for path in (tmp_path / "run").glob("logs/attempt-*/trainer-0.log"))
    assert f"took the weights of {tmp_path / 'torch_dist'}" in log
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (task / "model", tmp_path / "run" / "hf")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name].to(before[name].dtype)) for name in before), "it has learned"
