"""Debug switches: what excludes another, and that they may be added to any recipe."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import make_request
from hpcrl.launch.roles import commands, devices
from hpcrl.launch.site import SiteProfile
from hpcrl.plan import Host, local_hosts, make_plan
from hpcrl.run.rundir import RunDir
from tests.support.options import GRPO, SFT

EVAL = {"eval_interval": 1, "eval_prompt_data": ["a", "b.jsonl"]}
LOAD = {"load_debug_rollout_data": "d/{rollout_id}"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            GRPO | LOAD | {"debug_rollout_only": True},
            "--debug-rollout-only and --load-debug-rollout-data exclude each other",
        ),
        (
            GRPO | {"debug_train_only": True, "debug_rollout_only": True},
            "--debug-rollout-only and --debug-train-only exclude",
        ),
        (GRPO | {"debug_train_only": True}, "--debug-train-only needs data"),
        (SFT | {"debug_rollout_only": True}, "--loss-type sft_loss samples nothing"),
        (GRPO | LOAD | {"num_rollout": None, "num_epoch": 1}, "--load-debug-rollout-data without --num-rollout"),
        (
            GRPO | LOAD | {"save_debug_rollout_data": "e/{rollout_id}"},
            "overwrite the files of --load-debug-rollout-data",
        ),
        (GRPO | {"save_debug_rollout_data": "one"}, "file for all rollouts"),
        (GRPO | {"save_debug_rollout_data": "{step}"}, "only {rollout_id} may"),
        (GRPO | {"load_debug_rollout_data": "{rollout_id.x}"}, "only {rollout_id} may"),
    ],
)
def test_what_cannot_go_together(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(Options(**values))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        GRPO | EVAL | LOAD,
        GRPO | LOAD | {"debug_train_only": True, "prompt_data": None, "label_key": None, "rollout_num_gpus": None},
        GRPO
        | EVAL
        | {"debug_rollout_only": True, "save_debug_rollout_data": "{rollout_id:05d}", "vllm": {"max_num_seqs": 1}},
        GRPO | {"debug_rollout_only": True, "save_debug_rollout_data": "one", "num_rollout": 1},
        GRPO | {"debug_rollout_only": True, "actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 2},
        SFT | {"debug_train_only": True},
    ],
)
def test_a_switch_may_be_added_to_any_recipe(values: dict[str, Any]) -> None:
    check_options(Options(**values))


def test_a_run_without_trainer_asks_for_none() -> None:
    values = GRPO | {
        "debug_rollout_only": True,
        "actor_num_gpus_per_node": 8,
        "actor_num_nodes": 2,
        "rollout_num_gpus": 4,
    }
    options = Options(**values)
    hosts = local_hosts(options)
    assert hosts[0].slots == 4 and options.data_parallel_size == 1
    plan = make_plan(options, [Host("n", 4)], "r")
    assert [place.slots for place in plan.trainers] == [()] and len(plan.engines) == 4
    found = commands(options, plan, RunDir("/nowhere"), "n")
    assert [(role, command[2]) for role, _, command in found if role != "engine"] == [
        ("rollout", "hpcrl.rollout.main"),
        ("trainer", "hpcrl.trainer.rollout_driver"),
    ]
    per_slot = [role for slot in range(4) for role, _, _ in commands(options, plan, RunDir("/nowhere"), "n", slot)]
    assert sorted(per_slot) == ["engine"] * 4 + ["rollout", "trainer"]
    assert devices(plan, "trainer", 0, "n", None, "0,1,2,3") == {}
    for layout in ("heterogeneous", "homogeneous"):
        request = make_request([options], SiteProfile(layout=layout))
        assert sum(component.nodes * component.slots for component in request.components) == 4, request
    both = make_request([options, Options(**GRPO)], SiteProfile(layout="heterogeneous"))
    assert [component.name for component in both.components][:2] == ["trainer", "engine"], "a later stage trains"


def test_a_run_without_engines_asks_for_none() -> None:
    options = Options(**(GRPO | LOAD | {"rollout_num_gpus": 4}))
    assert local_hosts(options)[0].slots == 1 and not make_plan(options, [Host("n", 1)], "r").engines
    for layout in ("heterogeneous", "homogeneous"):
        request = make_request([options], SiteProfile(layout=layout))
        assert [component.name for component in request.components if component.slots] == ["trainer"]
        assert sum(component.nodes * component.slots for component in request.components) == 1
