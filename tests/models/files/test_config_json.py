"""config.json: one reader, and one error for whatever is wrong with the file, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.doctor.directories import check_model_directory
from hpcrl.errors import DataError
from hpcrl.models.convert import to_fp8
from hpcrl.models.files.config_json import read_config, read_object, write_config
from hpcrl.models.files.fp8 import scheme_of
from hpcrl.models.files.hf_writer import copy_assets
from hpcrl.rollout.prompts.tokenizer import Tokenizer

DAMAGE = [
    (None, "no config.json there"),
    (b"", "config.json is not JSON:.*;.*copy the model again"),
    (b'{"a": ', "config.json is not JSON"),
    (b"\xff\xfe\x00", "config.json is not JSON"),
    (b"[" * 100_000, "config.json is not JSON"),
    (b"[1]", "config.json holds no JSON object"),
    (b"null", "config.json holds no JSON object"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_everybody_says_the_same_of_a_bad_file(tmp_path: Path, damage: bytes | None, message: str) -> None:
    if damage is not None:
        (tmp_path / "config.json").write_bytes(damage)
    for reader in (read_config, Tokenizer, scheme_of):
        with pytest.raises(DataError, match=f"^--hf-checkpoint {tmp_path}: {message}"):
            reader(tmp_path)
    [finding] = check_model_directory(str(tmp_path))
    assert finding.line().startswith(f"fail  --hf-checkpoint {tmp_path}: {message.split(':')[0].split(';')[0]}")
    with pytest.raises(DataError, match=f"^--model-dir {tmp_path}: {message}"):
        to_fp8._config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"num_hidden_layers": 99999999999}',
        '{"num_hidden_layers": 300000000}',
        '{"vocab_size": "x"}',
        '{"hidden_size": -8}',
        '{"head_dim": 1.5}',
        '{"num_experts": true}',
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, text: str) -> None:
    """They are one error, before lists of that length are made."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=f"config.json has {text.split(chr(34))[1]} .*whole number"):
        read_config(tmp_path)


def test_unreadable_file_is_not_missing(tmp_path: Path) -> None:
    """A file that cannot be opened is not reported as missing."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(DataError, match="config.json.*Is a directory"):
        read_config(tmp_path)
    with pytest.raises(DataError, match="no config.json there"):
        read_config(tmp_path / "config.json" / "x")


def test_what_published_files_hold_is_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "model_type": "ü"}')
    config = read_config(str(tmp_path))
    assert config == {"time_step_limit": [0.0, float("inf")], "model_type": "ü"}
    write_config(tmp_path, config | {"more": 1})
    assert read_config(tmp_path) == config | {"more": 1}
    assert read_object(tmp_path, "generation_config.json") is None


def test_a_copy_keeps_what_is_nested(tmp_path: Path) -> None:
    """Of a model that also sees images what is written is not laid open as what is read."""
    whole = {"model_type": "qwen3_5", "text_config": {"hidden_size": 8, "model_type": "qwen3_5_text"}, "more": 1}
    origin, output = tmp_path / "origin", tmp_path / "output"
    origin.mkdir()
    output.mkdir()
    write_config(origin, whole | {"quantization_config": {}})
    assert read_config(origin)["hidden_size"] == 8
    copy_assets(origin, output, drop=("quantization_config",))
    assert read_object(output, "config.json") == whole
    write_config(origin, whole)
    tensor = torch.ones(32, 32, dtype=torch.bfloat16)
    save_file({"model.layers.0.mlp.up_proj.weight": tensor}, origin / "model.safetensors")
    fp8 = tmp_path / "fp8"
    assert to_fp8.main(["--model-dir", str(origin), "--save-dir", str(fp8)]) == 0
    found = read_object(fp8, "config.json") or {}
    assert found.pop("quantization_config") and found == whole
