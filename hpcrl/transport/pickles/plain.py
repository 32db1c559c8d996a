"""Reads and writes pickles of plain values: numbers, texts, containers, arrays, tensors, errors, and the records that
`records.py` lists.

    PlainPickler(stream).dump(value)
    value = PlainUnpickler(stream).load()

A pickle may name any function to be called, and hand any object a state.  Here every name is looked up in the list, and
a class or function that is listed is never handed to the pickle: a stand-in is, which can be called and nothing else.

Invariants: a name that is not listed is refused before anything is imported; what outlives the pickle (classes, the
members of enumerations) cannot be changed by it.
"""

from __future__ import annotations

import enum
import importlib
import io
import pickle
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import PosixPath, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from hpcrl.transport.pickles import values
from hpcrl.transport.pickles.records import (
    DTYPES,
    ENGINE_ENUMS,
    ENGINE_RECORDS,
    ENGINE_TUPLES,
    ENUMS,
    IPC_HANDLE,
    RECORDS,
)
from hpcrl.transport.pickles.values import refused


class SealedClass(type):
    """The kind of a class that takes the place of a listed one: a call of it makes a value, and it cannot be changed.

    Attributes:
        members: of the enumeration that it takes the place of.
    """

    members: dict[str, enum.Enum]

    def __setattr__(cls, name: str, value: Any) -> None:
        raise refused("a change of a class")


def _member(of: Any, name: Any) -> enum.Enum:
    if type(of) is not SealedClass or name not in of.members:
        raise refused("builtins.getattr of something that is not a member of a listed enumeration")
    return of.members[name]


#: what makes a value, by the name that pickles have for it
MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    # members of enumerations as Python 3.11.0 to 3.11.3 pickle them (Debian 12): getattr(the class, the name)
    ("builtins", "getattr"): _member,
    **{("builtins", kind.__name__): kind for kind in (bytearray, complex, dict, list, range, set, slice)},
    ("_io", "BytesIO"): io.BytesIO,  # what layers of Transformer Engine keep in addition to weights
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,  # StorageMeta, where the directory was given as a path
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.distributed.checkpoint.api", "CheckpointException"): values.checkpoint_exception,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.storage", "_load_from_bytes"): values.storage_from,
    ("vllm.distributed.device_communicators.shm_broadcast", "_rebuild_tensor"): values.tensor_from,
    **{
        (values.__name__, function.__name__): function
        for function in (
            values.array_from,
            values.error_from,
            values.ipc_handle_from,
            values.stack_from,
            values.tensor_from,
        )
    },
}


@cache
def look_up(module: str, name: str) -> Any:
    """What this name stands for: a stand-in, or a kind of numbers.

    Raises:
        Refused: if it is not listed; then nothing was imported either.
    """
    pair = (module, name)
    if module == "torch" and name in DTYPES:
        return getattr(torch, name)
    members: dict[str, enum.Enum] = {}
    if pair in MAKERS:
        make = MAKERS[pair]
    elif pair in RECORDS | ENGINE_RECORDS:
        kind = _class(pair)
        make = lambda: kind.__new__(kind)  # noqa: E731
    elif pair in ENUMS | ENGINE_ENUMS:
        kind = _class(pair)
        kind.__setstate__ = None  # which is what a state is given to: members are there for the whole process
        members = kind.__members__
        make = lambda value: kind(value)  # noqa: E731  (a second argument would make another enumeration)
    elif pair in ENGINE_TUPLES:
        make = _class(pair)
    else:
        raise refused(f"{module}.{name}"[:200])
    return SealedClass(name, (), {"__new__": lambda _, *parts: make(*parts), "__slots__": (), "members": members})


def _class(pair: tuple[str, str]) -> Any:
    return attrgetter(pair[1])(importlib.import_module(pair[0]))


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of plain values.  Refused for any other; what a damaged one raises, pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        """What the name stands for; Refused if it is not listed."""
        return look_up(module, name)


class ArrayPickler(pickle.Pickler):
    """Writes numpy's arrays so that PlainUnpickler reads them, and all else as pickle does."""

    def reducer_override(self, value: Any) -> Any:
        """The function that makes a value again, and its arguments."""
        if isinstance(value, np.ndarray | np.generic) and value.dtype.str in values.ARRAYS:
            return values.array_from, (value.tobytes(), value.dtype.str, value.shape)
        return NotImplemented


class PlainPickler(ArrayPickler):
    """Writes values so that PlainUnpickler reads them.

    A value that is not listed is written as pickle writes it: then all ranks refuse it, in the same collective.
    """

    def reducer_override(self, value: Any) -> Any:
        """The function that makes a value again, and its arguments."""
        kind = type(value)
        if kind is defaultdict:  # what makes a default is a program, and stays behind
            return dict, (), None, None, iter(value.items())
        if kind is deque:
            return list, (), None, iter(value)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            name = str(value.dtype).removeprefix("torch.")
            return values.tensor_from, (flat.numpy().tobytes(), tuple(value.shape), name)
        if isinstance(value, CheckpointException):
            return CheckpointException, value.args
        if isinstance(value, BaseException):
            name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            return values.error_from, (name, str(value))
        if kind is traceback.StackSummary:
            frames = [(one.filename, one.lineno or 0, one.name, one.line or "") for one in value]
            return values.stack_from, (frames,)
        if (kind.__module__, kind.__name__) == IPC_HANDLE:
            return values.ipc_handle_from, (bytes(value),)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """The pickle of a value."""
    stream = io.BytesIO()
    PlainPickler(stream).dump(value)
    return stream.getvalue()


def loads(data: bytes, buffers: Any = None) -> Any:
    """The value in a pickle; `buffers` are parts of it that came in frames of their own."""
    return PlainUnpickler(io.BytesIO(data), buffers=buffers).load()


def load(stream: BinaryIO) -> Any:
    """The value in a file."""
    return PlainUnpickler(stream).load()
