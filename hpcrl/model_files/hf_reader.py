"""The safetensors of a Hugging Face directory, a tensor or a slice of one at a time.

Invariant: a file is opened when its first tensor is asked for, and read only where it is indexed; what cannot be read is a
DataError that names it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from hpcrl.errors import DataError


class Files:
    """The safetensors files of a directory, opened lazily: one, or several with an index."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.opened: dict[str, Any] = {}
        index = directory / "model.safetensors.index.json"
        try:
            if index.is_file():
                self.where = msgspec.json.decode(index.read_bytes())["weight_map"]
            else:
                self.where = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise DataError(f"{index} is no index of safetensors: {error!r}") from error

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            path = self.directory / name
            if not path.is_file():
                raise DataError(f"{path} is not there", "--hf-checkpoint needs safetensors weights")
            try:
                self.opened[name] = self.stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} cannot be read: {error}", "is it complete?") from error
        return self.opened[name]

    def slice(self, name: str) -> Any:
        """Tensor `name`: its header now, its numbers when it is indexed."""
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(f"{self.directory / self.where[name]} does not hold {name}: {error}") from error
