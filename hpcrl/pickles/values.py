"""How values are made that a message or a pickle builds from others (tensors, sizes, errors), and the error that
refuses one.

Invariants: each function checks the types of all that it is given before it makes anything, and calls nothing of what
it is given; Refused is for what may well be whole but is not on the list, while what is damaged raises UnpicklingError
or what Python does.
"""

from __future__ import annotations

import io
import pickle
import re
import traceback
from collections.abc import Callable
from typing import Any

from hpcrl.errors import HpcrlError


class Refused(HpcrlError, pickle.UnpicklingError):
    """A message or pickle names, or asks for, something that is not on the list."""


def refused(what: str) -> Refused:
    """`what` (a name, mostly) is not on the list of `records.py`."""
    return Refused(
        f"a message of another rank, or a checkpoint's .metadata, holds {what}, which is not on hpcrl's list of "
        "plain values (not damage)",
        "custom functions may send numbers, texts, lists, dicts and tensors between ranks; a name of torch or "
        "Megatron-core comes with versions that docs/install.md does not list",
    )


def wrong(what: str) -> pickle.UnpicklingError:
    """A listed name, with other parts than torch and Megatron write it with."""
    return pickle.UnpicklingError(f"{what} has other parts than it is written with")


LAYOUTS = {"torch.strided", "torch.sparse_coo"}
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


def tensor_from(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor of `shape` and torch's `dtype`, on the CPU, whose memory in row order is `data`."""
    import torch

    if not isinstance(dtype, torch.dtype) or not is_shape(shape) or type(data) is not bytes:
        raise wrong("a tensor")
    if torch.Size(shape).numel() * dtype.itemsize != len(data):
        raise wrong("a tensor")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def array_from(data: bytes, kind: str, shape: tuple[int, ...]) -> Any:
    """numpy's array of `shape` and one of the ARRAYS kinds, whose memory in row order is `data`; of shape (), the
    number."""
    import numpy as np

    if type(kind) is not str or kind not in ARRAYS or not is_shape(shape) or type(data) is not bytes:
        raise wrong("an array")
    if len(data) != np.dtype(kind).itemsize * int(np.prod(shape, dtype=object)):
        raise wrong("an array")
    return np.frombuffer(bytearray(data), np.dtype(kind)).reshape(shape)[()]


def stream_from(data: bytes) -> io.BytesIO:
    """A file in memory: what layers of Transformer Engine keep in addition to weights comes in one."""
    if type(data) is not bytes:
        raise wrong("a file in memory")
    return io.BytesIO(data)


def error_from(name: str, text: str) -> Exception:
    """The error of another rank, `name` being its class's: one of ERRORS, or else in words."""
    if type(name) is not str or type(text) is not str:
        raise wrong("an error")
    return ERRORS[name](text) if name in ERRORS else RuntimeError(f"{name}: {text}")


def stack_from(frames: list[tuple[str, int, str, str]]) -> traceback.StackSummary:
    """Where it was raised: (file, line number, function, line) each.  The line comes along, so that no file is read for
    it."""
    if type(frames) is not list or any(
        type(one) is not tuple or [*map(type, one)] != [str, int, str, str] for one in frames
    ):
        raise wrong("a stack")
    return traceback.StackSummary.from_list(
        traceback.FrameSummary(file, number, name, lookup_line=False, line=line) for file, number, name, line in frames
    )


def checkpoint_exception(what: str, failures: dict[int, tuple[BaseException, traceback.StackSummary]]) -> BaseException:
    """torch's word to all ranks that some failed; its text is made of their errors and stacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    if type(what) is not str or type(failures) is not dict or any(type(rank) is not int for rank in failures):
        raise wrong("CheckpointException")
    for pair in failures.values():
        if type(pair) is not tuple or len(pair) != 2:
            raise wrong("CheckpointException")
        if not isinstance(pair[0], BaseException) or not isinstance(pair[1], traceback.StackSummary):
            raise wrong("CheckpointException")
    return CheckpointException(what, failures)


def size(numbers: Any) -> Any:
    """A tensor's shape or offset."""
    import torch

    if not is_shape(numbers):
        raise wrong("torch.Size")
    return torch.Size(numbers)


def layout(name: Any) -> Any:
    """The memory layout of a tensor, by torch's name for it."""
    import torch

    if type(name) is not str or name not in LAYOUTS:
        raise wrong("a layout of tensors")
    return getattr(torch, name.removeprefix("torch."))


def device(name: str) -> Any:
    """torch's device of this name, such as cuda:1."""
    import torch

    if not re.fullmatch(r"(cpu|cuda|meta)(:\d{1,4})?", name):
        raise wrong("a device")
    return torch.device(name)


def plain(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """`kind`, to be called with values of exactly these types."""

    def make(*parts: Any) -> Any:
        if any(type(part) not in types for part in parts):
            raise wrong(getattr(kind, "__name__", str(kind)))
        return kind(*parts)

    return make


def is_shape(numbers: Any) -> bool:
    """Whether it is a tuple or list of numbers from 0 to 2^62."""
    return type(numbers) in (tuple, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
