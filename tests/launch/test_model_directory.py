"""Fields of config.json that a family knows, architectures that generate text, and what a model directory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.launch.model_directory import check_fields, check_model_files
from hpcrl.launch.preflight import HostView, absent, check_model
from hpcrl.models.family import find_family, registry
from hpcrl.models.files.config_json import with_text_part
from tests.documents.scene import FP8, PUBLISHED
from tests.documents.texts import REPO
from tests.support.families import make
from tests.support.published_models import MODELS


def check(config: dict[str, Any]) -> None:
    config = with_text_part(config)
    family = find_family(config, "dir")
    check_fields(config, family, family.transformer(config))


@pytest.mark.parametrize("name", MODELS)
def test_published_fields_are_known(name: str) -> None:
    check(dict(MODELS[name][1]))


@pytest.mark.parametrize(
    "model_type", sorted(set(registry()) - {"kimi_k2", "mimo"})
)  # of which transformers knows none
def test_transformers_own_fields_are_known(model_type: str) -> None:
    """Every field that transformers writes for a family, whatever its value."""
    published = next(c for _, c, _ in MODELS.values() if c["model_type"] == model_type.removesuffix("_text"))
    model, family = with_text_part(dict(published)), registry()[model_type]
    fields = dict.fromkeys(transformers.AutoConfig.for_model(model_type).to_dict(), "x")
    check_fields(fields, family, family.transformer(model))


DENSE = dict(MODELS["Qwen2.5-0.5B"][1])


@pytest.mark.parametrize(
    "more",
    [
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"num_experts": 128},
        {"kv_lora_rank": 512},
        {"logit_scale": 0.1},
    ],
)
def test_an_unknown_field_is_refused_by_name(more: dict[str, Any], tmp_path: Path) -> None:
    """Those of experts and of latent attention too, where the family has none; what is off says nothing."""
    check(DENSE | dict.fromkeys(more, None) | {"use_mrope": False, "new": []})
    with pytest.raises(DataError, match=next(iter(more))):
        check(DENSE | more)
    (tmp_path / "config.json").write_text(json.dumps(DENSE | more))
    with pytest.raises(UsageError, match=next(iter(more))):
        check_model(Options(hf_checkpoint=str(tmp_path)))


@pytest.mark.parametrize("name", ["Qwen2ForSequenceClassification", "Qwen2Model", "Qwen2ForRewardModel"])
def test_what_generates_no_text_is_refused(name: str) -> None:
    check(DENSE | {"architectures": ["Qwen2ForCausalLM"]})
    with pytest.raises(DataError, match=f"{name} generates no text"):
        check(DENSE | {"architectures": [name]})


def test_a_model_directory_is_looked_into(tmp_path: Path) -> None:
    """Its config.json, every file of its index, its tokenizer; the command line's errors name what is missing."""
    place = make(tmp_path / "model", "qwen3")
    options = Options(hf_checkpoint=str(place))
    assert not absent([options], HostView(code=False))
    check_model_files(str(place))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model-00001-of-00002.safetensors").write_bytes(b"")
    (error,) = absent([options], HostView(code=False))
    assert "lacks model-00002-of-00002.safetensors" in str(error)
    assert not absent([options], HostView(lambda path: True, code=False)), "the nodes alone have it"
    (place / "model.safetensors.index.json").unlink()
    for file in place.glob("*token*"):
        file.unlink()
    with pytest.raises(UsageError, match="no tokenizer"):
        check_model_files(str(place))
    for file in place.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(UsageError, match="no safetensors"):
        check_model_files(str(place))
    for file in place.glob("*.bin"):
        file.unlink()
    check_model_files(str(place))  # config.json alone describes a model that is elsewhere
    (place / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        check_model_files(str(place))


@pytest.mark.parametrize("name", sorted(path.name for path in (REPO / "examples/configs").iterdir()))
def test_shipped_configs_are_the_published_models(name: str) -> None:
    config = json.loads((REPO / "examples/configs" / name / "config.json").read_text())
    quantised = config.pop("quantization_config", None)
    assert config.pop("architectures") == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    assert config == MODELS[PUBLISHED[name]][1] and quantised == (FP8 if name.endswith("FP8") else None)


@pytest.mark.parametrize("command", ["plan", "submit"])
def test_recipes_are_planned_without_a_download(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the config.json that hpcrl ships, which a note says; a model of another name has no estimate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    words = {"plan": ["plan"], "submit": ["submit", "--dry-run"]}[command]
    status = main([*words, str(REPO / "examples/qwen3-4b-8gpu.toml")])
    said = capsys.readouterr()
    assert "taken is the config.json of Qwen3-4B" in said.err
    assert status == (0 if command == "plan" else 2), "the prompts are not here either"
    assert command == "submit" or "trainer rank: " in said.out
    refused = [*words, str(REPO / "examples/qwen3-4b-8gpu.toml"), "--tensor-model-parallel-size", "3"]
    assert main([*refused, "--actor-num-gpus-per-node", "3"]) == 2 and "32 attention heads" in capsys.readouterr().err
    main([*words, str(REPO / "examples/qwen3-4b-8gpu.toml"), "--hf-checkpoint", "data/mine"])
    assert "taken is" not in capsys.readouterr().err
