"""What the options of an adapter must say together."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from tests.support.options import GRPO

LORA: dict[str, Any] = {"lora_rank": 8}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mtp_num_layers": 1, "enable_mtp_training": True}, "--enable-mtp-training and --lora-rank"),
        ({"critic_load": "c", "advantage_estimator": "ppo"}, "--critic-load and --lora-rank"),
        ({"megatron": {"moe_router_bias_update_rate": 0.001}}, "--moe-router-bias-update-rate 0.001"),
        ({"megatron": {"moe_shared_expert_overlap": True}}, "--moe-shared-expert-overlap"),
        ({"target_modules": []}, "--target-modules names nothing"),
        ({"vllm": {"max_loras": 4}}, "--vllm-max-loras"),
    ],
)
def test_what_does_not_go_with_adapters(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        check_options(Options(**GRPO | LORA | fields))
    assert told in str(error.value)


def test_a_reference_needs_no_files() -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    check_options(Options(**GRPO | LORA | kl))
    with pytest.raises(UsageError, match="needs a reference model"):
        check_options(Options(**GRPO | kl))


@pytest.mark.parametrize(
    "name", ["lora_alpha", "lora_dropout", "target_modules", "lora_type", "lora_serve", "use_rslora"]
)
def test_without_a_rank_they_do_nothing(name: str) -> None:
    values = {"lora_alpha": 8.0, "lora_dropout": 0.1, "target_modules": ["q_proj"], "lora_type": "canonical_lora"}
    values |= {"lora_serve": "merged", "use_rslora": True}
    with pytest.raises(UsageError, match="--lora-rank is not given"):
        check_options(Options(**GRPO, **{name: values[name]}), [name])
