"""Which matrices have an adapter, by whose names, and what their parameters are called."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.models.family import registry
from hpcrl.models.lora.matrices import adapted, adapter_tensors
from hpcrl.models.lora.peft import target_names
from hpcrl.models.lora.settings import LoraSettings, lora_settings
from tests.models.test_families import CONFIG

SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def of(**fields: Any) -> list[Any]:
    return adapted(registry()["qwen3"].tensors(CONFIG), LoraSettings(4, 8.0, **fields))


def leaves(**fields: Any) -> set[str]:
    return {matrix.base.hf[part].split(".")[-2] for matrix in of(**fields) for part in matrix.parts}


def test_all_linear_are_the_seven() -> None:
    found = of()
    assert leaves() == SEVEN
    assert len(found) == 8
    assert found[0].prefix == "decoder.layers.0.self_attention.linear_qkv_adapter."
    names = [name for name, _ in adapter_tensors(found[:1])]
    assert [name.rpartition("_adapter.")[2] for name in names] == [
        "lora_A.q_proj",
        "lora_A.k_proj",
        "lora_A.v_proj",
        "lora_B",
    ]


@pytest.mark.parametrize(
    ("targets", "excluded", "wanted"),
    [
        (["linear_qkv"], [], {"q_proj", "k_proj", "v_proj"}),
        (["q_proj", "mlp.down_proj"], [], {"q_proj", "down_proj"}),
        (["all-linear"], ["linear_fc1", "*.self_attn.*"], {"down_proj"}),
        (["layers.0.*.up_proj"], [], {"up_proj"}),
    ],
)
def test_targets_by_either_name(targets: list[str], excluded: list[str], wanted: set[str]) -> None:
    assert leaves(targets=tuple(targets), excluded=tuple(excluded)) == wanted


@pytest.mark.parametrize(
    ("targets", "excluded", "told"),
    [
        (["lm_head"], [], "--target-modules lm_head"),
        (["q_prj"], [], "--target-modules q_prj"),
        (["all-linear"], ["router"], "--exclude-modules router"),
        (["q_proj"], ["q_proj"], "layer with an adapter"),
    ],
)
def test_what_names_nothing(targets: list[str], excluded: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        of(targets=tuple(targets), excluded=tuple(excluded))


def test_one_input_for_several() -> None:
    (matrix, *_) = of(shared_inputs=True, targets=("q_proj", "v_proj"))
    layer = "model.layers.0.self_attn."
    assert [rule.hf for rule in matrix.rules[:-1]] == [(f"{layer}q_proj.lora_A.weight",)]
    assert matrix.copies == {f"{layer}v_proj.lora_A.weight": f"{layer}q_proj.lora_A.weight"}
    assert matrix.absent == {f"{layer}k_proj.lora_B.weight"}


def test_scale_is_pefts() -> None:
    options = Options(hf_checkpoint="m", lora_rank=16, lora_alpha=8)
    assert lora_settings(options).scale == 0.5  # type: ignore[union-attr]
    assert lora_settings(options.model_copy(update={"use_rslora": True})).scale == 2.0  # type: ignore[union-attr]
    assert lora_settings(Options(hf_checkpoint="m")) is None


def test_names_for_peft_mean_no_others() -> None:
    assert target_names(of(), of()) == SEVEN
    some = of(targets=("layers.0.*.up_proj", "q_proj"))
    assert target_names(some, of()) == {"q_proj", "model.layers.0.mlp.up_proj"}
