"""The model's directory: are its files whole, and does its tokenizer load.

Invariant: no weights are read, only the headers of their files; the tokenizer is loaded in a process of its own, so that
a package that hangs or crashes costs a deadline and a line.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcrl.run.command import ask
from hpcrl.run.findings import Finding, count, last_line, size

SECONDS = 120.0
MEND = "download or copy the model again"
_LOAD = "import sys; from hpcrl.rollout.tokenizer import load_tokenizer as f; print(f(sys.argv[1]).vocab_size)"


def check_model_directory(directory: str, python: str = sys.executable, seconds: float = SECONDS) -> Iterator[Finding]:
    """Findings about --hf-checkpoint."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        yield Finding("fail", "", f"--hf-checkpoint {directory}: no config.json there", "name a Hugging Face model directory")
        return
    yield from files(path)
    answer = ask([python, "-c", _LOAD, str(path)], seconds)
    if answer.code == 0:
        yield Finding("ok", "", f"the tokenizer loads; {last_line(answer.out)} token ids")
    else:
        why = answer.said.removeprefix("hpcrl.errors.DataError: ")
        yield Finding("fail", "", f"the tokenizer of {directory} does not load: {why}", "mend the model's directory")


def weights(path: Path) -> list[Path]:
    """The weight files that the directory should have.  ValueError if its index cannot be read."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [path / name for name in sorted(set(names))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of weights") from error


def files(path: Path) -> list[Finding]:
    """Whether every weight file is there and as long as its header says."""
    try:
        wanted = weights(path)
    except ValueError as error:
        return [Finding("fail", "", str(error), MEND)]
    wrong = [Finding("fail", "", f"{file}: {why}", MEND) for file in wanted if (why := flaw(file))]
    return wrong or [Finding("ok", "", f"weights in {path}: {count(len(wanted), 'file')}, whole, {size(total(path))}")]


def flaw(file: Path) -> str:
    """What is wrong with a safetensors file, "" if nothing: 8 bytes of header length, header (JSON), then the data
    that the header describes, to the last byte (the format's README)."""
    try:
        length = file.stat().st_size
        with file.open("rb") as stream:
            (header,) = struct.unpack("<Q", stream.read(8))
            if header > min(length, 100_000_000):
                return "its header is damaged"
            tensors = json.loads(stream.read(header))
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (struct.error, ValueError):
        return "its header is damaged"
    try:
        end = max((int(item["data_offsets"][1]) for name, item in tensors.items() if name != "__metadata__"), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "its header is damaged"
    missing = 8 + header + end - length
    if missing > 0:
        return f"{size(missing)} of it are missing"
    return "" if missing == 0 else f"it has {size(-missing)} too much"


def total(path: Path) -> int:
    """Bytes of the weight files that are there; 0 without any."""
    try:
        return sum(file.stat().st_size for file in weights(path) if file.is_file())
    except ValueError:
        return 0
