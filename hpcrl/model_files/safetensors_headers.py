"""What the safetensors files of a Hugging Face directory hold, from their headers alone.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end of its
bytes), and the bytes.  Invariant: no number of a header is trusted before it is compared with the size of the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: torch's names by those of safetensors
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


#: the dtypes that may travel between trainer and engine, by torch's names, and their bytes
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
BYTES = ITEM_BYTES | {"float8_e8m0fnu": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype (torch's name), shape, the file that holds it, where in it its bytes begin, and how many."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


def listing(directory: str | Path) -> dict[str, Entry]:
    """All tensors by name; empty if there are no safetensors (another format, or weights made up at start).

    DataError names a file that is missing, truncated or malformed, and a tensor that the index has and no file.
    """
    directory = Path(directory)
    if not (directory / INDEX).is_file():
        return _read(directory / SINGLE) if (directory / SINGLE).is_file() else {}
    try:
        where = json.loads((directory / INDEX).read_bytes())["weight_map"]
        files = sorted(set(where.values()))
        if any(Path(name).name != name for name in files):
            raise ValueError("a file outside of the directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{directory / INDEX} is no index of safetensors: {error!r}") from error
    found: dict[str, Entry] = {}
    for name in files:
        found |= _read(directory / name)
    if absent := sorted(set(where) - set(found)):
        raise DataError(f"{directory / INDEX} names {absent[0]}, which {where[absent[0]]} does not hold", "is it complete?")
    return {name: found[name] for name in where}


def _read(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise DataError(f"{path} is truncated: {size} bytes, its header alone takes {8 + length}", "is it complete?")
            header = json.loads(file.read(length))
        entries = {name: _entry(path.name, held, 8 + length) for name, held in header.items() if name != "__metadata__"}
        end = max((held["data_offsets"][1] for name, held in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "is the directory complete?") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} has no header of safetensors: {error!r}") from error
    if 8 + length + end != size:
        raise DataError(f"{path} is truncated: {size} bytes, its header promises {8 + length + end}", "is it complete?")
    return entries


def _entry(file: str, held: dict[str, Any], start: int) -> Entry:
    """What the header says of one tensor; ValueError if that cannot be."""
    begin, end = map(int, held["data_offsets"])
    dtype, shape = DTYPES.get(held["dtype"], held["dtype"].lower()), tuple(map(int, held["shape"]))
    if begin < 0 or end < begin or (dtype in BYTES and end - begin != prod(shape) * BYTES[dtype]):
        raise ValueError(f"{end - begin} bytes for {dtype}{list(shape)}")
    return Entry(dtype, shape, file, start + begin, end - begin)
