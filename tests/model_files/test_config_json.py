"""config.json: one reader, and one error for whatever is wrong with the file, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.convert import to_fp8
from hpcrl.doctor.directories import check_model_directory
from hpcrl.errors import DataError
from hpcrl.model_files.config_json import read_config, read_object, write_config
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.weights.fp8 import scheme_of

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
