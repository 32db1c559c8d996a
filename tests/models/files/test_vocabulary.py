"""A teacher of other tokens is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import DataError
from hpcrl.models.files.config_json import check_same_vocabulary
from hpcrl.utils.untrusted_files import GIVEN

WORDS = {"<pad>": 0, "a": 1, "b": 2}
ADDED = [{"id": 3, "content": "<end>"}]


def directory(path: Path, size: int = 4, vocabulary: Any = None, added: Any = None) -> Path:
    """A model directory; vocabulary None: without tokenizer.json."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": size}))
    if vocabulary is not None:
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added or []}))
    return path


def test_the_same_tokens_pass(tmp_path: Path) -> None:
    own = directory(tmp_path / "own", vocabulary=WORDS, added=ADDED)
    pairs = [["<pad>", 0.0], ["a", -1.0], ["b", -2.0]]  # of a unigram model
    for name, fields in {
        "same": {"vocabulary": WORDS, "added": ADDED},
        "pairs": {"vocabulary": pairs, "added": ADDED},
        "bare": {},
    }.items():
        check_same_vocabulary(directory(tmp_path / name, **fields), "--opd-teacher-load", own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"size": 5},
            r"--opd-teacher-load .*/teacher has a vocabulary of 5 tokens, --hf-checkpoint .*/own of 4; a teacher's tokens must",
        ),
        (
            {"vocabulary": WORDS | {"b": 1, "a": 2}, "added": ADDED},
            "token 1 is 'b' in --opd-teacher-load .* and 'a' in .*; 2 tokens differ",
        ),
        ({"vocabulary": WORDS}, "token 3 is None in --opd-teacher-load .* and '<end>'"),
    ],
)
def test_another_token_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    own = directory(tmp_path / "own", vocabulary=WORDS, added=ADDED)
    with pytest.raises(DataError, match=message):
        check_same_vocabulary(directory(tmp_path / "teacher", **fields), "--opd-teacher-load", own)


def test_a_teacher_without_a_model_is_named(tmp_path: Path) -> None:
    own = directory(tmp_path / "own")
    with pytest.raises(DataError, match="--opd-teacher-load .*: no config.json there"):
        check_same_vocabulary(tmp_path / "absent", "--opd-teacher-load", own)


def test_a_large_vocabulary_is_read(tmp_path: Path) -> None:
    """Published tokenizer.json files have 20 MB and more."""
    added = [{"id": 3, "content": "x" * (GIVEN + 1)}]
    own = directory(tmp_path / "own", vocabulary=WORDS, added=added)
    check_same_vocabulary(directory(tmp_path / "teacher", vocabulary=WORDS, added=added), "--opd-teacher-load", own)
