"""What Megatron's settings say of the model and ask of the packages is looked at before any node is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch import preflight
from hpcrl.launch.preflight import check_model, missing_packages, refuse_wrong_settings, same_packages
from hpcrl.launch.site import SiteProfile
from tests.support.published_models import MODELS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    return tmp_path


def test_model_flags_match_config_json(model: Path) -> None:
    """Flags that describe the model are compared with config.json."""
    check_model(Options(hf_checkpoint=str(model), megatron={"num_layers": 36, "gated_linear_unit": True}))
    check_model(Options(hf_checkpoint="/nowhere/at/all", megatron={"num_layers": 35}))
    with pytest.raises(UsageError, match="--num-layers 35: the model's config.json says 36"):
        check_model(Options(hf_checkpoint=str(model), megatron={"num_layers": 35}))
    with pytest.raises(UsageError, match="is a glm4 model, config.json says 'qwen3'"):
        check_model(Options(hf_checkpoint=str(model), spec=["slime_plugins.models.glm4", "get_glm_spec"]))
    (model / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UsageError, match="'mamba' is not supported"):
        check_model(Options(hf_checkpoint=str(model)))


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex", "optimizer_cpu_offload": True}
    options = Options(megatron=flex)
    assert not list(missing_packages(options, lambda name: True))
    told = [str(error) for error in missing_packages(options, lambda name: name != "deep_ep")]
    assert len(told) == 2 and "--moe-enable-deepep needs DeepEP, and deep_ep is not installed" in told[0]
    flash = Options(megatron={"attention_backend": "flash"})
    assert not list(missing_packages(flash, lambda name: name == "transformer_engine")), "one of two will do"
    assert list(missing_packages(flash, lambda name: False))
    monkeypatch.setattr(preflight, "locate", lambda package: ())
    assert not list(missing_packages(options, lambda name: False)), "no trainer runs where Megatron-core is not"


def test_all_of_it_at_once_and_once(model: Path) -> None:
    wrong = Options(hf_checkpoint=str(model), megatron={"num_layers": 35, "gradient_accumulation_fusion": True})
    with pytest.raises(UsageError) as error:
        refuse_wrong_settings([wrong, wrong], same_packages=True)
    assert str(error.value).count("--num-layers 35") == 1 and "--gradient-accumulation-fusion" in str(error.value)
    with pytest.raises(UsageError, match="^--num-layers"):
        refuse_wrong_settings([wrong], same_packages=False)


def test_whose_packages_these_are() -> None:
    assert same_packages(SiteProfile())
    assert not same_packages(SiteProfile(python="/other/python"))
    assert not same_packages(SiteProfile(trainer={"gpus_per_node": 0}))


def test_four_bit_weights_are_refused(model: Path) -> None:
    """Weights in four bits are refused where engines are needed."""
    config = json.loads((model / "config.json").read_text())
    four = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    }
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": four}))
    with pytest.raises(
        UsageError, match=r"--hf-checkpoint .*config.json has a quantization_config \(compressed-tensors\)"
    ):
        refuse_wrong_settings([Options(hf_checkpoint=str(model))], same_packages=False)
    refuse_wrong_settings([Options(hf_checkpoint=str(model), loss_type="sft_loss")], same_packages=False)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    refuse_wrong_settings([Options(hf_checkpoint=str(model))], same_packages=False)
    (model / "config.json").write_text(json.dumps(MODELS["MiniMax-M2"][1]))  # another name of the format
    refuse_wrong_settings([Options(hf_checkpoint=str(model))], same_packages=False)
