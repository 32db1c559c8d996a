"""The model's directory: are its files whole, and does its tokenizer load.

Invariant: no weights are read, only the headers of their files; the tokenizer is loaded in a process of its own, so
that a package that hangs or crashes costs a deadline and a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.findings import Finding, count, last_line, size
from hpcrl.model_files.config_json import read_config
from hpcrl.model_files.safetensors_files import AGAIN, SINGLE, read_header, read_index
from hpcrl.run.command import ask

SECONDS = 120.0
_LOAD = "import sys; from hpcrl.rollout.prompts.tokenizer import load_tokenizer as f; print(f(sys.argv[1]).vocab_size)"


def check_model_directory(directory: str, python: str = sys.executable, seconds: float = SECONDS) -> Iterator[Finding]:
    """Findings about --hf-checkpoint."""
    path = Path(directory)
    try:
        read_config(path)
    except DataError as error:
        yield Finding("fail", "", error.what, error.hint)
        return
    yield from files(path)
    answer = ask([python, "-c", _LOAD, str(path)], seconds)
    if answer.code == 0:
        yield Finding("ok", "", f"the tokenizer loads; {last_line(answer.out)} token ids")
    else:
        why = answer.said.removeprefix("hpcrl.errors.DataError: ")
        yield Finding("fail", "", f"the tokenizer of {directory} does not load: {why}", "mend the model's directory")


def weights(path: Path) -> list[Path]:
    """The weight files that the directory should have.  DataError if its index cannot be read."""
    where = read_index(path)
    return [path / name for name in ([SINGLE] if where is None else sorted(set(where.values())))]


def files(path: Path) -> list[Finding]:
    """Whether every weight file is there and as long as its header says."""
    try:
        wanted = weights(path)
    except DataError as error:
        return [Finding("fail", "", error.what, error.hint or AGAIN)]
    wrong = [Finding("fail", "", why, AGAIN) for file in wanted if (why := flaw(file))]
    return wrong or [Finding("ok", "", f"weights in {path}: {count(len(wanted), 'file')}, whole, {size(total(path))}")]


def flaw(file: Path) -> str:
    """What is wrong with a safetensors file, "" if nothing: its header must describe the file to the last byte."""
    try:
        read_header(file)
    except DataError as error:
        return error.what
    return ""


def total(path: Path) -> int:
    """Bytes of the weight files that are there; 0 without any."""
    try:
        return sum(file.stat().st_size for file in weights(path) if file.is_file())
    except DataError:
        return 0
