"""The safetensors files of a Hugging Face directory: headers (names, dtypes and shapes), and one tensor or a slice of
it at a time.

Every module that opens such a file does it through this one; safetensors' own reader checks the header against the
file, to the last byte.  Invariants: torch is imported only where tensors are asked for as torch's; a file is opened
when its first tensor is asked for, and read only where it is indexed; what is missing or damaged is a DataError that
names the file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from hpcrl.errors import DataError
from hpcrl.utils.untrusted_files import MOST, read_given_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download or copy the model again"
#: torch's names by those of safetensors
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


#: the dtypes that may travel between trainer and engine, by torch's names, and their bytes
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype (torch's name, or safetensors' in lower case where DTYPES has none), shape, the file that holds
    it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(directory: str | Path) -> dict[str, str] | None:
    """Tensor -> name of its file, as the index has it; None if there is no index, so that all are in one file.

    Raises:
        DataError: if the index cannot be read, or names a file outside of the directory.
    """
    path = Path(directory) / INDEX
    try:
        found = msgspec.json.decode(read_given_bytes(path, MOST), type=_Index).weight_map
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", AGAIN) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not an index of safetensors: {error}", AGAIN) from error
    if any(Path(name).name != name for name in found.values()):
        raise DataError(f"{path} is not an index of safetensors: it names a file outside of the directory")
    return found


def open_file(
    path: Path, framework: Literal["numpy", "pt"] = "numpy", backend: Literal["mmap", "pread"] = "mmap"
) -> safe_open:
    """safetensors' own reader of one file, whose header is whole and fits the file; use it as a context.

    Args:
        framework: what its tensors are, "pt" imports torch.
        backend: mmap leaves what was read in the process's memory, pread does not.

    Raises:
        DataError: if the file is missing or damaged.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist", "is the directory complete? it needs safetensors weights")
    try:
        return safe_open(path, framework=framework, backend=backend)
    except (SafetensorError, OSError) as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise DataError(f"{path} cannot be read: {why}", f"it is damaged or not complete: {AGAIN}") from error


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, as they are in it.

    Raises:
        DataError: as `open_file`.
    """
    with open_file(path) as file:
        parts = {name: file.get_slice(name) for name in file.offset_keys()}
        return {
            name: Entry(DTYPES.get(part.get_dtype(), part.get_dtype().lower()), tuple(part.get_shape()), path.name)
            for name, part in parts.items()
        }


def listing(directory: str | Path) -> dict[str, Entry]:
    """All tensors by name; empty if there are no safetensors (another format, or weights made up at start).

    Raises:
        DataError: names a file that is missing or damaged, and a tensor that the index has and no file.
    """
    directory = Path(directory)
    where = read_index(directory)
    if where is None:
        return read_header(directory / SINGLE) if (directory / SINGLE).is_file() else {}
    found: dict[str, Entry] = {}
    for name in sorted(set(where.values())):
        found |= read_header(directory / name)
    if absent := sorted(set(where) - set(found)):
        raise DataError(
            f"{directory / INDEX} names {absent[0]}, which {where[absent[0]]} does not hold", "is it complete?"
        )
    return {name: found[name] for name in where}


class SafetensorsDirectory:
    """The safetensors files of a directory, opened lazily: one, or several with an index.

    Attributes:
        where: tensor -> name of its file, where that is known already.
        read: bytes of tensors that `tensor` has read.
    """

    def __init__(self, directory: Path, stack: ExitStack, where: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.stack = stack
        self.opened: dict[str, Any] = {}
        self.read = 0
        where = where or read_index(directory)
        self.where = dict.fromkeys(self._open(SINGLE).keys(), SINGLE) if where is None else where

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            self.opened[name] = self.stack.enter_context(open_file(self.directory / name, "pt"))
        return self.opened[name]

    def tensor(self, name: str) -> Any:
        """All of tensor `name`, in memory of its own: nothing of the file stays mapped.

        Raises:
            DataError: names the file.
        """
        return self._read_with(name, lambda file: file.get_tensor(name))

    def _read_with(self, name: str, take: Callable[[Any], Any]) -> Any:
        """What `take` reads of the file of tensor `name`, in memory of its own."""
        path = self.directory / self.where[name]
        key = f"{path.name} read"
        try:
            if key not in self.opened:
                self.opened[key] = self.stack.enter_context(open_file(path, "pt", "pread"))
            found = take(self.opened[key])
        except (SafetensorError, OSError) as error:
            raise DataError(f"{name} of {path} cannot be read: {error}", AGAIN) from error
        self.read += found.nbytes
        return found

    def slice(self, name: str) -> Any:
        """Tensor `name`: its header now, its numbers when it is indexed."""
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(f"{self.directory / self.where[name]} does not hold {name}: {error}") from error
