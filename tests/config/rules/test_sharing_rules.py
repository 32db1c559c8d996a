"""What --colocate goes with, what does nothing without it, and what becomes of slime's spellings."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import build_options, check_options
from hpcrl.config.slime.arguments import translate
from hpcrl.errors import UsageError
from tests.config.slime.guides import GUIDES
from tests.support.options import GRPO

SHARED = {"colocate": True, "rollout_num_gpus": 1}
EXPERTS = {"vllm": {"enable_expert_parallel": True}}


@pytest.mark.parametrize(
    ("values", "turns", "train", "level"),
    [
        ({}, False, False, 0),
        (SHARED, True, True, 2),
        (SHARED | {"offload_train": False}, True, False, 2),
        (SHARED | {"offload_rollout": False}, True, True, 0),
        (SHARED | EXPERTS, True, True, 2),
        (SHARED | {"vllm": {"enable_expert_parallel": True, "enable_eplb": True}}, True, True, 1),
        (SHARED | {"debug_rollout_only": True}, False, False, 0),
    ],
)
def test_both_sides_make_room_unless_told_otherwise(
    values: dict[str, Any], turns: bool, train: bool, level: int
) -> None:
    options = Options(**(GRPO | values))
    assert (options.takes_turns, options.offloads_train, options.sleep_level) == (turns, train, level)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload_train": True}, "--offload-train has no effect here: --colocate is not given"),
        ({"offload_rollout": False}, "--offload-rollout has no effect here: --colocate is not given"),
        (SHARED | {"megatron": {"nccl_ub": True}}, "leave out --nccl-ub, or give --no-offload-train"),
    ],
)
def test_what_cannot_be_or_does_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(Options(**(GRPO | values)))


def test_slimes_spellings() -> None:
    words = GUIDES["GLM4-9B, colocated"][0]

    def resolved(*more: str) -> Options:
        return build_options(translate([*words, *more]).values)

    assert resolved().offloads_train and resolved("--offload").sleep_level == 2
    assert resolved("--offload").offload_train is True
    assert not resolved("--no-offload-train").offloads_train and resolved("--no-offload-rollout").sleep_level == 0
