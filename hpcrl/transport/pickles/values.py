"""Functions that make a value from the parts that a pickle has of it, and the error that refuses one.

Pickles of our own processes name these functions instead of those of numpy and Python, which would call what they are
given, or take any bytes for pointers.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import traceback
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from hpcrl.errors import HpcrlError
from hpcrl.transport.pickles.records import DTYPES, IPC_HANDLE


class Refused(HpcrlError, pickle.UnpicklingError):
    """A pickle names, or asks for, something that is not on the list."""


def refused(what: str) -> Refused:
    """`what` (a name, mostly) is not on the list of `records.py`."""
    return Refused(
        f"a message of another rank, or a checkpoint's .metadata, holds {what}, which is not on hpcrl's list of "
        "plain values (not damage)",
        "custom functions may send numbers, texts, lists, dicts and tensors between ranks; a name of torch or "
        "Megatron-core comes with versions that docs/install.md does not list",
    )


def wrong(what: str) -> pickle.UnpicklingError:
    """A listed name, with other parts than it is written with."""
    return pickle.UnpicklingError(f"{what} has other parts than it is written with")


#: numpy's arrays that ranks may send
ARRAYS = {"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"}
#: errors of other ranks that keep their class
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        OSError,
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        MemoryError,
        RuntimeError,
        ValueError,
        TypeError,
    )
}


def array_from(data: bytes, kind: str, shape: tuple[int, ...]) -> Any:
    """numpy's array of `shape` and one of the ARRAYS kinds, whose memory in row order is `data`; of shape (), the
    number."""
    if type(kind) is not str or kind not in ARRAYS:
        raise wrong("an array")
    return np.frombuffer(bytearray(memoryview(data)), np.dtype(kind)).reshape(shape)[()]


def tensor_from(data: Any, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The tensor of `shape` and torch's `dtype`, on the CPU, whose memory in row order is `data`."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise wrong("a tensor")
    kind = getattr(torch, dtype)
    memory = bytearray(memoryview(data))
    return torch.frombuffer(memory, dtype=kind).reshape(shape) if memory else torch.empty(shape, dtype=kind)


def storage_from(data: bytes) -> Any:
    """The memory of a tensor, as torch.save wrote it; on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def ipc_handle_from(data: bytes) -> Any:
    """FlashInfer's address of a GPU's memory."""
    kind: Any = getattr(importlib.import_module(IPC_HANDLE[0]), IPC_HANDLE[1])
    if type(data) is not bytes or len(data) != ctypes.sizeof(kind):
        raise wrong(IPC_HANDLE[1])
    return kind.from_buffer_copy(data)


def error_from(name: str, text: str) -> Exception:
    """The error of another rank, `name` being its class's: one of ERRORS, or else an error with its text."""
    if type(name) is not str or type(text) is not str:
        raise wrong("an error")
    return ERRORS[name](text) if name in ERRORS else RuntimeError(f"{name}: {text}")


def stack_from(frames: list[tuple[str, int, str, str]]) -> traceback.StackSummary:
    """Where an error was raised: (file, line number, function, line) each.  The line comes along, so that no file is
    read for it."""
    if type(frames) is not list or any(
        type(one) is not tuple or [*map(type, one)] != [str, int, str, str] for one in frames
    ):
        raise wrong("a stack")
    return traceback.StackSummary.from_list(
        traceback.FrameSummary(file, number, name, lookup_line=False, line=line) for file, number, name, line in frames
    )


def checkpoint_exception(what: str, failures: dict[int, tuple[BaseException, traceback.StackSummary]]) -> BaseException:
    """torch's word to all ranks that some failed; its text is made of their errors and stacks."""
    if type(what) is not str or type(failures) is not dict:
        raise wrong("CheckpointException")
    for pair in failures.values():
        if type(pair) is not tuple or [isinstance(pair[0], BaseException), type(pair[1])] != [
            True,
            traceback.StackSummary,
        ]:
            raise wrong("CheckpointException")
    return CheckpointException(what, failures)
