"""Engines over several nodes that other users may use are refused; which nodes those are is Slurm's own word."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.slurm import squeue, srun
from hpcrl.plan import Host, Plan, make_plan
from hpcrl.run.process import CommandResult

JOB = "JobId=7 JobName=a UserId=u(1) Partition={partition} NumNodes=2 OverSubscribe={over} Contiguous=0\n"
PARTITION = "PartitionName={name} ExclusiveUser={user} OverSubscribe={over}\n"
PARTITIONS = {
    "open": PARTITION.format(name="open", user="NO", over="NO"),
    "whole": PARTITION.format(name="whole", user="NO", over="EXCLUSIVE"),
    "mine": PARTITION.format(name="mine", user="YES", over="NO"),
}


def slurm(monkeypatch: pytest.MonkeyPatch, *jobs: str, code: int = 0) -> None:
    def call(words: list[str], *_: Any) -> CommandResult:
        return CommandResult(code, "".join(jobs) if "job" in words else PARTITIONS[words[-1]], "scontrol: no")

    monkeypatch.setattr(squeue, "call", call)
    monkeypatch.setattr(srun, "PATIENCE", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")


OPTIONS = Options(hf_checkpoint="m", actor_num_gpus_per_node=1, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)


def plan() -> Plan:
    return make_plan(OPTIONS, [Host(f"n{i}", 1, f"10.0.0.{i}", "eth0") for i in range(3)], "run")


@pytest.mark.parametrize(
    ("over", "partition"), [("NO", "open"), ("USER", "open"), ("OK", "whole"), ("OK", "mine"), ("YES", "mine")]
)
def test_nodes_of_one_user_are_recognised(monkeypatch: pytest.MonkeyPatch, over: str, partition: str) -> None:
    """By the job's word or by its partition's."""
    slurm(monkeypatch, JOB.format(over=over, partition=partition))
    srun.refuse_shared_nodes(plan())


def test_an_engine_over_shared_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one component of the job may be shared, or Slurm does not answer; not if the site allows it, nor an
    engine within a node."""
    alone = JOB.format(over="NO", partition="open")
    for jobs, code in (([alone, JOB.format(over="OK", partition="open")], 0), ([], 1)):
        slurm(monkeypatch, *jobs, code=code)
        with pytest.raises(UsageError, match="shared_nodes = true") as caught:
            srun.refuse_shared_nodes(plan())
        assert "engine 0 lies on n1, n2" in caught.value.what
        with monkeypatch.context() as allowed:
            allowed.setenv("HPCRL_SHARED_NODES", "1")
            srun.refuse_shared_nodes(plan())
    near = make_plan(OPTIONS, [Host("n0", 1, "10.0.0.1", "eth0"), Host("n1", 2, "10.0.0.2", "eth0")], "run")
    srun.refuse_shared_nodes(near)


def test_a_busy_controller_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [CommandResult(1, "", "timed out"), CommandResult(0, JOB.format(over="NO", partition="open"), "")]
    monkeypatch.setattr(squeue, "call", lambda *_: answers.pop(0))
    monkeypatch.setattr(srun.time, "sleep", lambda _: None)
    assert srun.shared("7") is None and not answers
