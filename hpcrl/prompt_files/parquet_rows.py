"""A parquet file as rows.  Needs the package pyarrow, an extra of hpcrl: pip install hpcrl[parquet].

Invariant: the table lies in memory as Arrow's columns, not as Python objects; a row becomes Python values when it is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, HpcrlError
from hpcrl.prompt_files.rows import sha256_of


class ParquetRows:
    """The rows of a parquet file, or of a slice of it."""

    def __init__(self, path: Path, rows: slice = slice(None)) -> None:
        """Read it.  HpcrlError without pyarrow; DataError if the file is no parquet; OSError if it cannot be read."""
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
            raise DataError(f"{path} is no parquet file: {error}") from error
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
    """(where, row) of the first rows, without reading the rest; none where pyarrow is not installed."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        return
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=count)
        rows = next(batches, None)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no parquet file: {error}") from error
    for number, row in enumerate([] if rows is None else rows.to_pylist(), 1):
        yield f"{path}, row {number}", _without_nulls(row)


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
