"""A prompt file as numbered rows, each read when it is asked for: .jsonl, or parquet with the package pyarrow (an
extra: pip install hpcrl[parquet]); or a folder of task folders (`hpcrl/sandbox/harbor/rows.py`).

Invariants: of a .jsonl file only where its rows begin is held (12 bytes a row); what a row says is decided by the bytes
that the size and SHA-256 were taken of, or the file is refused as changed.  A parquet table is in memory as Arrow's
columns, not as Python objects; a row becomes Python values when it is asked for.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hpcrl.config.prompt_words import KINDS, PromptWord
from hpcrl.errors import DataError, HpcrlError
from hpcrl.sandbox.harbor.rows import TaskRows

BOM = b"\xef\xbb\xbf"


class PromptRows(Protocol):
    """The rows of one prompt file, or of a slice of it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`.

        Raises:
            DataError: if it is not a JSON object, or the file has changed.
        """
        ...

    def where(self, index: int) -> str:
        """Its file and line, for an error."""
        ...


def open_rows(word: PromptWord, most: int | None = None) -> OpenedRows:
    """The rows that a word names.

    Args:
        most: rows of the file that are read at most, without its SHA-256; None: all.

    Raises:
        DataError: if the file cannot be read, is of no known kind, or the slice is empty.
    """
    path = Path(word.path)
    try:
        if path.is_dir():
            rows: OpenedRows = TaskRows(path, word.rows)
        elif path.suffix == ".parquet":
            rows = ParquetRows(path, word.rows, most)
        elif path.suffix in KINDS:
            rows = JsonlRows(path, word.rows, most)
        else:
            raise DataError(
                f"{path} is not a {' or '.join(KINDS)} file",
                "a prompt file is JSON with one object a line (.jsonl), parquet, or a folder of task folders",
            )
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    if not len(rows):
        expected = "" if path.suffix == ".parquet" else "one JSON object a line is expected"
        raise DataError(
            f"{path if word.whole else word.word} holds no prompts", expected if word.whole else "choose other rows"
        )
    return rows


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

    def __init__(self, path: Path, rows: slice = slice(None), most: int | None = None) -> None:
        """Read it once, to the end or to its row number `most`.

        Raises:
            OSError: as `open`.
        """
        self.path = path
        self._file = path.open("rb")
        self._begins, self._lines = array("q"), array("I")  # of each row
        self.size = 0
        digest = hashlib.sha256()
        for number, text in enumerate(self._file, 1):
            if (text.removeprefix(BOM) if number == 1 else text).strip():
                self._begins.append(self.size)
                self._lines.append(number)
            digest.update(text)
            self.size += len(text)
            if len(self._begins) == most:
                break
        self._taken = range(len(self._begins))[rows]
        self._begins.append(self.size)
        self.sha256 = digest.hexdigest()
        self._written = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = self._taken[index]
        begin, end = self._begins[at : at + 2]
        text = os.pread(self._file.fileno(), end - begin, begin)
        if self._stamp() != self._written:
            raise DataError(
                f"{self.path} was written to while the run reads it", "put the old file back, and resume the run"
            )
        return _decoded(self.path, self._lines[at], text)

    def where(self, index: int) -> str:
        return f"{self.path}, line {self._lines[self._taken[index]]}"


def kind_of_json(value: Any) -> str:
    """A JSON value's kind, for a message."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


# ---- parquet


class ParquetRows:
    """The rows of a parquet file, or of a slice of it."""

    def __init__(self, path: Path, rows: slice = slice(None), most: int | None = None) -> None:
        """Read it, of `most` the first rows alone. HpcrlError without pyarrow.

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
        try:
            file = parquet.ParquetFile(path, memory_map=True)
            first = islice(file.iter_batches(most or 1), 1)
            table = file.read() if most is None else arrow.Table.from_batches(first, file.schema_arrow)
        except arrow.ArrowException as error:
            with path.open("rb") as data:
                what, command = _BEGINNINGS[LFS]
                if data.read(len(LFS)) == LFS:
                    raise DataError(f"{path} is {what}", f"{command} fetches it") from error
            raise DataError(f"{path} is not a parquet file: {error}") from error
        with path.open("rb") as data:
            self.sha256 = hashlib.file_digest(data, "sha256").hexdigest() if most is None else ""
        taken = range(table.num_rows)[rows]
        self._first = taken[0] if len(taken) else 0
        self._batches = table.slice(self._first, len(taken)).combine_chunks()

    def __len__(self) -> int:
        return self._batches.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self._batches.slice(index, 1).to_pylist()
        # Arrow gives every object of a column the keys of all of them
        return {key: _without_nulls(value) for key, value in row.items()}

    def where(self, index: int) -> str:
        return f"{self.path}, row {self._first + index + 1}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


OpenedRows = JsonlRows | ParquetRows | TaskRows
