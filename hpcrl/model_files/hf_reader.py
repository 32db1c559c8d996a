"""The safetensors of a Hugging Face directory, a tensor or a slice of one at a time.

Invariant: a file is opened when its first tensor is asked for, and read only where it is indexed; what cannot be read
is a DataError that names it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hpcrl.errors import DataError
from hpcrl.model_files.safetensors_headers import SINGLE, open_file, read_index


class Files:
    """The safetensors files of a directory, opened lazily: one, or several with an index."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.opened: dict[str, Any] = {}
        where = read_index(directory)
        self.where = dict.fromkeys(self._open(SINGLE).keys(), SINGLE) if where is None else where

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            self.opened[name] = self.stack.enter_context(open_file(self.directory / name, "pt"))
        return self.opened[name]

    def slice(self, name: str) -> Any:
        """Tensor `name`: its header now, its numbers when it is indexed."""
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(f"{self.directory / self.where[name]} does not hold {name}: {error}") from error
