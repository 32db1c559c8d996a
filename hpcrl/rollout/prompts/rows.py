"""A prompt file as numbered rows, each read when it is asked for: .jsonl, or parquet with the package pyarrow (an
extra: pip install hpcrl[parquet]); or a folder of task folders (`hpcrl/sandbox/harbor/rows.py`).

Invariants: of a .jsonl file only where its rows begin is held (8 bytes a row); what a row says is decided by the bytes
that the size and SHA-256 were taken of, or the file is refused as changed.  A parquet table is in memory as Arrow's
columns, not as Python objects; a row becomes Python values when it is asked for.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from hpcrl.config.prompt_words import KINDS, PromptWord
from hpcrl.errors import DataError, HpcrlError
from hpcrl.sandbox.harbor.rows import TaskRows

if TYPE_CHECKING:
    import numpy as np

BOM = b"\xef\xbb\xbf"


class PromptRows(Protocol):
    """The rows of one prompt file, or of a slice of it.

    Attributes:
        size: bytes of the whole file.
        sha256: of the whole file.
    """

    path: Path
    size: int
    sha256: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`.

        Raises:
            DataError: if it is not a JSON object, or the file has changed.
        """
        ...

    def line(self, index: int) -> int:
        """Its number in the file, from 1."""
        ...

    def where(self, index: int) -> str:
        """Its file and line, for an error."""
        ...


def open_rows(word: PromptWord) -> PromptRows:
    """The rows that a word names.

    Raises:
        DataError: if the file cannot be read, is of no known kind, or the slice is empty.
    """
    path = Path(word.path)
    try:
        if path.is_dir():
            rows: PromptRows = TaskRows(path, word.rows)
        elif path.suffix == ".parquet":
            rows = ParquetRows(path, word.rows)
        elif path.suffix in KINDS:
            rows = JsonlRows(path, word.rows)
        else:
            raise DataError(
                f"{path} is not a {' or '.join(KINDS)} file",
                "a prompt file is JSON with one object a line (.jsonl), parquet, or a folder of task folders",
            )
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    if not len(rows):
        raise nothing_in(word)
    return rows


def nothing_in(word: PromptWord) -> DataError:
    """The error for a file or a slice without rows."""
    what = (
        "choose other rows"
        if not word.whole
        else ""
        if word.path.endswith(".parquet")
        else "one JSON object a line is expected"
    )
    return DataError(f"{word.path if word.whole else word.word} holds no prompts", what)


LFS = b"version https://git-lfs"
#: how a file begins that is no JSON lines -> what it is, and what to do
_BEGINNINGS = {
    LFS: ("a pointer of Git LFS, not the file itself", "git lfs pull"),
    b"\xff\xfe": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path}"),
    b"{\x00": ("UTF-16 text", "iconv -f UTF-16LE -t UTF-8 {path}"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {path}"),
    b"PAR1": ("a parquet file", "let its name end in .parquet"),
    b"\x1f\x8b": ("compressed", "gunzip {path}"),
    b"[": ("one JSON array", "jq -c '.[]' {path}"),
}


def _decoded(path: Path, number: int, text: bytes) -> dict[str, Any]:
    """The row in line `number` of a .jsonl file.

    Raises:
        DataError: names the line, and what the file is where that can be told.
    """
    text = (text.removeprefix(BOM) if number == 1 else text).strip()
    try:
        row = msgspec.json.decode(text)
        what = "" if isinstance(row, dict) else f"not a JSON object but {kind_of_json(row)}"
    except RecursionError:
        what = "JSON that is nested too deep"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = f"not JSON: {error}"
    if what:
        said, command = _kind_of_file(text, number)
        hint = f"one JSON object a line is expected: {command.format(path=path)}" if said else ""
        raise DataError(f"{path}, line {number}: {what}{said and f'; this is {said}'}", hint)
    return row


def _kind_of_file(text: bytes, number: int) -> tuple[str, str]:
    """What a file with such a line is, and the command that makes lines of JSON of it; two empty texts if unknown."""
    if b"\r" in text:
        return "lines end in CR only", "tr '\\r' '\\n' < {path}"
    if number == 1 and (known := [kind for begin, kind in _BEGINNINGS.items() if text.startswith(begin)]):
        return known[0]
    if text == b"{":
        return "JSON over several lines", "jq -c . {path}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 in column {error.start + 1}", "iconv -f LATIN1 -t UTF-8 {path}"
    return "", ""


class JsonlRows:
    """A .jsonl file: one JSON object a line; blank lines count as lines and are not rows."""

    def __init__(self, path: Path, rows: slice = slice(None)) -> None:
        """Read it once, to the end.

        Raises:
            OSError: as `open`.
        """
        self.path = path
        self._file = path.open("rb")
        starts, numbers, self.size, self.sha256 = _index(self._file)
        taken = range(len(numbers))[rows]
        first, last = (taken[0], taken[-1] + 1) if len(taken) else (0, 0)
        self._starts = starts[first : last + 1].copy()
        self._first_line = int(numbers[first]) if len(taken) else 1
        together = not len(taken) or int(numbers[last - 1]) - self._first_line == len(taken) - 1
        self._lines = None if together else numbers[first:last].copy()  # without blank lines they follow from the first
        self._written = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin = int(self._starts[index])
        end = int(self._starts[index + 1])
        text = os.pread(self._file.fileno(), end - begin, begin)
        if self._stamp() != self._written:
            raise DataError(
                f"{self.path} was written to while the run reads it", "put the old file back, and resume the run"
            )
        return _decoded(self.path, self.line(index), text)

    def line(self, index: int) -> int:
        return self._first_line + index if self._lines is None else int(self._lines[index])

    def where(self, index: int) -> str:
        return f"{self.path}, line {self.line(index)}"


def _index(file: BinaryIO) -> tuple[np.ndarray, np.ndarray, int, str]:
    """Where every row of a .jsonl file begins (int64 [rows + 1], the last is its end), their line numbers, its size and
    SHA-256."""
    digest = hashlib.sha256()
    at = 0
    begins = array("q")
    lines = array("q")
    for number, text in enumerate(file, 1):
        digest.update(text)
        if not _blank(text, number):
            begins.append(at)
            lines.append(number)
        at += len(text)
    begins.append(at)
    import numpy as np  # not where nothing is read: it takes as long as much of a command's start

    return np.asarray(begins, np.int64), np.asarray(lines, np.int64), at, digest.hexdigest()


def _blank(text: bytes, number: int) -> bool:
    """Whether line `number` of a .jsonl file holds no row."""
    return not (text.removeprefix(BOM) if number == 1 else text).strip()


def first_rows(path: Path, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of the first rows of a .jsonl file, without reading the rest.

    Raises:
        DataError: as `PromptRows`.
    """
    found = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if _blank(text, number):
                    continue
                yield f"{path}, line {number}", _decoded(path, number, text)
                found += 1
                if found == count:
                    return
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror}") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kind_of_json(value: Any) -> str:
    """A JSON value's kind, for a message."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


# ---- parquet


class ParquetRows:
    """The rows of a parquet file, or of a slice of it."""

    def __init__(self, path: Path, rows: slice = slice(None)) -> None:
        """Read it. HpcrlError without pyarrow.

        Raises:
            DataError: if the file is not parquet.
            OSError: if it cannot be read.
        """
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise HpcrlError(
                f"{path}: reading parquet needs the package pyarrow", "pip install 'hpcrl[parquet]'"
            ) from None
        self.path = path
        self.size = path.stat().st_size
        self.sha256 = sha256_of(path)
        try:
            table = parquet.ParquetFile(path, memory_map=True).read()
        except arrow.ArrowException as error:
            raise _no_parquet(path, error) from error
        taken = range(table.num_rows)[rows]
        self._first = taken[0] if len(taken) else 0
        self._batches = table.slice(self._first, len(taken)).combine_chunks()

    def __len__(self) -> int:
        return self._batches.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self._batches.slice(index, 1).to_pylist()
        return _without_nulls(row)

    def line(self, index: int) -> int:
        return self._first + index + 1

    def where(self, index: int) -> str:
        return f"{self.path}, row {self.line(index)}"


def first_parquet_rows(path: Path, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of the first rows, without reading the rest."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=count)
        rows = next(batches, None)
    except (arrow.ArrowException, OSError) as error:
        raise _no_parquet(path, error) from error
    for number, row in enumerate([] if rows is None else rows.to_pylist(), 1):
        yield f"{path}, row {number}", _without_nulls(row)


def _no_parquet(path: Path, error: Exception) -> DataError:
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            return DataError(f"{path} is {_BEGINNINGS[LFS][0]}", f"{_BEGINNINGS[LFS][1]} fetches it")
    return DataError(f"{path} is not a parquet file: {error}")


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """The row, and nulls inside of its columns left out: Arrow gives every object of a column the keys of all of
    them."""
    return {key: _clean(value) for key, value in row.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
