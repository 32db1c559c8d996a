"""A run on fewer hosts than it began with."""

from __future__ import annotations

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.launch.attempts.fewer_hosts import on_fewer, what_changed
from hpcrl.plan import Host

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
