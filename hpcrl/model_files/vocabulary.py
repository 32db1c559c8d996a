"""Whether two models speak of the same tokens, by the files of their Hugging Face directories.

Invariant: nothing is loaded but JSON; where a directory has no tokenizer.json, the size of the vocabulary is all that
is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.model_files.config_json import read_config, read_object


def check_same_vocabulary(directory: Path, flag: str, own: Path) -> None:
    """DataError, naming `flag` and the first difference, unless the models of both directories have the same tokens.

    own: the directory of --hf-checkpoint.
    """
    theirs, ours = _size(directory, flag), _size(own)
    if theirs != ours:
        raise DataError(
            f"{flag} {directory} has a vocabulary of {theirs} tokens, --hf-checkpoint {own} of {ours}", HINT
        )
    a, b = _tokens(directory, flag), _tokens(own)
    if a and b and (different := sorted(id for id in a.keys() | b.keys() if a.get(id) != b.get(id))):
        first = different[0]
        said = f"token {first} is {a.get(first)!r} in {flag} {directory} and {b.get(first)!r} in --hf-checkpoint {own}"
        raise DataError(f"{said}; {len(different)} tokens differ", HINT)


HINT = "a teacher's tokens must be the student's: choose a teacher with the same tokenizer"


def _size(directory: Path, flag: str = "--hf-checkpoint") -> object:
    config = read_config(directory, flag)
    return (config.get("text_config") or config).get("vocab_size")


def _tokens(directory: Path, flag: str = "--hf-checkpoint") -> dict[int, str]:
    """Id -> token, of tokenizer.json; empty where there is none."""
    found = read_object(directory, "tokenizer.json", flag) or {}
    vocabulary: Any = (found.get("model") or {}).get("vocab")
    tokens: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        tokens = {number: token for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # a unigram model: pairs of token and score
        tokens = {number: entry[0] for number, entry in enumerate(vocabulary)}
    return tokens | {entry["id"]: entry["content"] for entry in found.get("added_tokens") or []}
