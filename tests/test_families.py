"""Model families: found by file, read from config.json, refusing what they do not implement."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hpcrl.models
from hpcrl.errors import DataError
from hpcrl.models import family, qwen3

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_a_family_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(qwen3.__file__).read_text().replace('model_type="qwen3"', 'model_type="toy"')
    (tmp_path / "toy_family.py").write_text(text)
    monkeypatch.setattr(hpcrl.models, "__path__", [*hpcrl.models.__path__, str(tmp_path)])
    assert family.registry().keys() >= {"qwen3", "toy"}
    assert family.find(CONFIG | {"model_type": "toy"}, "somewhere").model_type == "toy"
    sys.modules.pop("hpcrl.models.toy_family")


def test_an_unknown_model_type_names_the_known_ones() -> None:
    with pytest.raises(DataError, match="somewhere: model type 'gpt9' is not supported; supported: .*qwen3"):
        family.find({"model_type": "gpt9"}, "somewhere")


def test_config_that_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: No such file"):
        family.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is no JSON"):
        family.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match="holds no JSON object"):
        family.read_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_rope_theta_of_old_and_new_configs(fields: dict) -> None:
    assert qwen3.gpt(CONFIG | fields)["rotary_base"] == 5e5
    assert family.rope(CONFIG | fields)["kind"] == "default"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'.*'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_a_family_does_not_implement_is_refused(fields: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        qwen3.FAMILY.transformer(CONFIG | fields)


def test_head_size_without_head_dim_follows_from_the_hidden_size() -> None:
    config = {k: v for k, v in CONFIG.items() if k != "head_dim"}
    assert qwen3.transformer(CONFIG)["kv_channels"] == 24
    assert qwen3.transformer(config)["kv_channels"] == 16


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_all_layers_and_of_tied_embeddings(tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    rules = dict(qwen3.FAMILY.tensors(config))
    assert rules["decoder.layers.1.mlp.linear_fc2.weight"].hf == ("model.layers.1.mlp.down_proj.weight",)
    assert "decoder.layers.2.mlp.linear_fc2.weight" not in rules
    assert rules["output_layer.weight"].hf == (("model.embed_tokens.weight",) if tied else ("lm_head.weight",))
    assert qwen3.FAMILY.ignores("lm_head.weight", config) == tied
