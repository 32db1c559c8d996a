"""A run on fewer hosts than it began with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from hpcrl.launch.attempts import attempt
from hpcrl.launch.attempts.attempt import HostsSilent
from hpcrl.launch.attempts.fewer_hosts import on_fewer, what_changed
from hpcrl.launch.attempts.held_hosts import HeldHosts
from hpcrl.plan import Host
from hpcrl.run.role import read_options, write_size
from hpcrl.run.rundir import RunDir, write_atomic

GIVEN = {
    "hf_checkpoint": "m",
    "prompt_data": "p",
    "custom_rm_path": "a.b",
    "rollout_batch_size": 12,
    "n_samples_per_prompt": 4,
}


def options(**given: object) -> Options:
    return Options(**(GIVEN | {"num_rollout": 9, "actor_num_gpus_per_node": 2} | given))


def hosts(*slots: int) -> list[Host]:
    return [Host(f"node{number}", count) for number, count in enumerate(slots)]


@pytest.mark.parametrize(
    ("given", "slots", "nodes", "engines"),
    [
        ({"actor_num_nodes": 4, "rollout_num_gpus": 2}, (2, 2, 2, 2), 3, 2),
        # 5 nodes would be 10 replicas, which do not divide the 48 samples of a step
        ({"actor_num_nodes": 6, "rollout_num_gpus": 2}, (2,) * 6, 4, 2),
        ({"actor_num_nodes": 2, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}, (2,) * 5, 2, 3),
        (
            {"actor_num_nodes": 3, "tensor_model_parallel_size": 2, "loss_type": "sft_loss", "label_key": "l"},
            (2, 2),
            2,
            0,
        ),
        ({"actor_num_nodes": 3, "tensor_model_parallel_size": 2, "colocate": True}, (2, 2), 2, 4),
    ],
)
def test_the_largest_run_that_fits(given: dict[str, object], slots: tuple[int, ...], nodes: int, engines: int) -> None:
    smaller = on_fewer(options(**given), hosts(*slots))
    assert smaller is not None and (smaller.actor_num_nodes, smaller.num_engines) == (nodes, engines)
    assert smaller.step_batch_size == options(**given).step_batch_size
    assert str(smaller.world_size) in what_changed(options(**given), smaller) or engines


@pytest.mark.parametrize(
    "given",
    [
        {"actor_num_nodes": 2, "tensor_model_parallel_size": 4, "loss_type": "sft_loss", "label_key": "l"},
        {"actor_num_nodes": 1, "rollout_num_gpus": 2},
    ],
)
def test_a_replica_is_not_cut(given: dict[str, object]) -> None:
    """Nor is a run without an engine, or without a trainer, one."""
    check_options(options(**given), given=())
    assert on_fewer(options(**given), hosts(2)) is None


def test_the_size_is_of_an_attempt_alone(tmp_path: Path) -> None:
    """The next one, and a run that is continued by hand, have that of the run."""
    rundir, given = RunDir.create(tmp_path / "run"), options(actor_num_nodes=4, rollout_num_gpus=2)
    write_atomic(rundir.options_file, given.model_dump_json().encode())
    rundir.begin()
    write_size(rundir, given.model_copy(update={"actor_num_nodes": 3}))
    assert read_options(rundir).actor_num_nodes == 3 and read_options(rundir).rollout_num_gpus == 2
    assert read_options(rundir, whole=True) == given
    assert read_options(RunDir(rundir.root, 1)) == given


@pytest.mark.parametrize(("elastic", "nodes"), [(True, 1), (False, 0)])
def test_a_later_stage_has_the_hosts_that_are_left(tmp_path: Path, elastic: bool, nodes: int) -> None:
    """It begins smaller, or the job is queued again: the loss of an earlier stage is no error of its settings."""
    held, rundir = HeldHosts(hosts=hosts(2)), RunDir.create(tmp_path / "run")
    given = options(actor_num_nodes=2, loss_type="sft_loss", label_key="l", elastic=elastic)
    backend: Any = SimpleNamespace(left_out=[])
    with pytest.raises(UsageError):
        attempt._planned(given, backend, held, "run", rundir)
    backend.left_out = ["node1"]
    if elastic:
        fitting, plan = attempt._planned(given, backend, held, "run", rundir)
        assert fitting.actor_num_nodes == nodes and plan.trainer_hosts == ("node0",)
    else:
        with pytest.raises(HostsSilent, match="without node1"):
            attempt._planned(given, backend, held, "run", rundir)
