"""What ranks send one another as Python objects, in msgpack: torch's object collectives, which Megatron-core's
checkpoints and vLLM's workers use.

    MessageWriter(stream).dump(value)        # as pickle.Pickler and pickle.Unpickler are called by torch
    value = MessageReader(stream).load()

A number, text, bytes or None stands for itself; everything else is an array whose first item says what it is (TAGS).

Invariants: nothing in a message is a program: each tag is one function of this file, which makes a value from parts
whose types it has checked; classes are those of the list in `records.py`; no decoded value can be called.  A
value of any other class is sent as its name, so that every rank refuses it, in the same collective.
"""

from __future__ import annotations

import enum
import io
import pickle
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache
from pathlib import PosixPath, PurePosixPath
from typing import Any, BinaryIO

import msgspec

from hpcrl.pickles import values
from hpcrl.pickles.records import (
    DTYPES,
    ENUMS,
    FILLED,
    NAMED_TUPLES,
    check_keys,
    class_of,
    fill,
    member,
    state_of,
)
from hpcrl.pickles.values import refused, wrong

MOST_DEEP = 100  #: containers within containers
#: listed classes; a message has their numbers, which are the same in all ranks of a run: they run the same code
LISTED = sorted(FILLED | ENUMS | NAMED_TUPLES)
NUMBERS = {pair: number for number, pair in enumerate(LISTED)}
INT64 = range(-(1 << 63), 1 << 64)  #: numbers that msgpack has
Encoded = Any  #: None, bool, int, float, str, bytes, or a list that begins with a tag
_decoder = msgspec.msgpack.Decoder()


class MessageWriter:
    """Writes one value."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def dump(self, value: Any) -> None:
        """Write `value`.

        Raises:
            UnpicklingError: if it is nested deeper than MOST_DEEP, or within itself.
        """
        self._stream.write(msgspec.msgpack.encode(encode(value)))


class MessageReader:
    """Reads one value."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def load(self) -> Any:
        """The value.

        Raises:
            Refused: if it holds something that is not listed.
            UnpicklingError: if it is damaged.
        """
        try:
            node = _decoder.decode(self._stream.read())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise pickle.UnpicklingError(f"a message of another rank is damaged: {error}") from error
        return decode(node)


# ---- from a value to what msgpack can write


def encode(value: Any, depth: int = 0) -> Encoded:
    """What stands for `value` in a message."""
    if depth > MOST_DEEP:
        raise pickle.UnpicklingError(f"a value for other ranks is nested more than {MOST_DEEP} deep")
    kind = type(value)
    if value is None or kind in (bool, float, bytes) or (kind is int and value in INT64):
        return value
    if kind is str and value.isascii():
        return value
    if kind in CONTAINERS:
        return [CONTAINERS[kind], *(encode(part, depth + 1) for part in value)]
    if kind in (dict, defaultdict, OrderedDict):  # what makes a default is a program, and stays behind
        return [
            "ordered dict" if kind is OrderedDict else "dict",
            *(encode(part, depth + 1) for pair in value.items() for part in pair),
        ]
    if kind in PLAIN:
        tag, parts = PLAIN[kind]
        return [tag, *parts(value)]
    number = NUMBERS.get((kind.__module__, kind.__qualname__))
    if number is None:
        return _encode_other(value, depth)
    if LISTED[number] in FILLED:
        return ["record", number, encode(state_of(value), depth + 1)]
    if LISTED[number] in ENUMS:
        return ["enum", number, value.value]
    return ["named tuple", number, *(encode(part, depth + 1) for part in value)]


def _text(value: str) -> tuple[bytes]:
    return (value.encode(errors="surrogatepass"),)


#: containers: the tag, before the parts
CONTAINERS: dict[type, str] = {list: "list", deque: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
#: values of these very classes: tag, and the parts
PLAIN: dict[type, tuple[str, Callable[[Any], tuple[Encoded, ...]]]] = {
    str: ("str", _text),
    int: ("int", lambda value: (str(value) if abs(value) < 10**4000 else "",)),
    complex: ("complex", lambda value: (value.real, value.imag)),
    bytearray: ("bytearray", lambda value: (bytes(value),)),
    range: ("range", lambda value: (*map(encode, (value.start, value.stop, value.step)),)),
    slice: ("slice", lambda value: (*map(encode, (value.start, value.stop, value.step)),)),
    PosixPath: ("path", lambda value: _text(str(value))),
    PurePosixPath: ("pure path", lambda value: _text(str(value))),
    io.BytesIO: ("stream", lambda value: (value.getvalue(),)),
    traceback.StackSummary: (
        "stack",
        lambda value: tuple([one.filename, one.lineno or 0, one.name, one.line or ""] for one in value),
    ),
}


def _encode_other(value: Any, depth: int) -> Encoded:
    """What stands for a value of torch's or numpy's own, for an error, or for what cannot be sent."""
    import numpy as np
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    kind = type(value)
    if isinstance(value, torch.Tensor) and _dtype_name(value.dtype) and value.layout is torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return ["tensor", flat.view(torch.uint8).numpy().tobytes(), _dtype_name(value.dtype), *value.shape]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.str in values.ARRAYS:
        return ["array", value.tobytes(), value.dtype.str, *value.shape]
    if kind is torch.Size:
        return ["size", *value]
    if kind is torch.dtype and _dtype_name(value):
        return ["dtype", _dtype_name(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is torch.layout:
        return ["layout", str(value)]
    if isinstance(value, CheckpointException):
        return ["checkpoint exception", *(encode(part, depth + 1) for part in value.args)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, BaseException):
        return ["error", name.removeprefix("builtins."), str(value)]
    return ["unlisted", name[:200]]


def _dtype_name(dtype: Any) -> str:
    """torch's name of a listed dtype, without `torch.`; "" for any other."""
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else ""


# ---- and back


def decode(node: Encoded, depth: int = 0) -> Any:
    """The value that `node` stands for."""
    kind = type(node)
    if kind in (str, int, float, bytes, bool, type(None)):
        return node
    if depth > MOST_DEEP or kind is not list or not node or type(node[0]) is not str or node[0] not in TAGS:
        raise wrong("a message of another rank")
    tag, *parts = node
    if tag in NESTED:
        parts = [decode(part, depth + 1) for part in parts]
    try:
        return TAGS[tag](parts)
    except (TypeError, ValueError, OverflowError) as error:  # too few or other parts
        raise wrong(f"a message of another rank ({tag})") from error


def _types(parts: list[Any], *kinds: tuple[type, ...]) -> list[Any]:
    """`parts`, if each is of one of the types that are allowed in its place.

    Raises:
        UnpicklingError: else.
    """
    if len(parts) != len(kinds) or not all(type(part) in allowed for part, allowed in zip(parts, kinds, strict=True)):
        raise wrong("a message of another rank")
    return parts


STR = (str,)
BYTES = (bytes,)
INT = (int,)
REAL = (float,)
BOUND = (int, type(None))


def _mapping(into: Any, parts: list[Any]) -> Any:
    if len(parts) % 2:
        raise wrong("a dict")
    check_keys(parts[::2], into)
    into.update(zip(parts[::2], parts[1::2], strict=True))
    return into


def _set(kind: type, parts: list[Any]) -> Any:
    check_keys(parts, set())
    return kind(parts)


def _text_from(parts: list[Any]) -> str:
    return _types(parts, BYTES)[0].decode(errors="surrogatepass")


def _int_from(parts: list[Any]) -> int:
    text = _types(parts, STR)[0]
    if len(text) > 4000 or not text.isascii() or not text.removeprefix("-").isdigit():
        raise wrong("a number")
    return int(text)


def _array(parts: list[Any]) -> Any:
    data, kind, *shape = parts
    return values.array_from(data, kind, tuple(shape))


def _tensor(parts: list[Any]) -> Any:
    data, name, *shape = parts
    return values.tensor_from(data, class_of("torch", *_types([name], STR)), tuple(shape))


def _stack(parts: list[Any]) -> traceback.StackSummary:
    return values.stack_from([tuple(_types(one, STR, INT, STR, STR)) if type(one) is list else one for one in parts])


def _listed(number: Any, among: set[tuple[str, str]]) -> Any:
    """The class with this number, which must be one of these."""
    if type(number) is not int or not 0 <= number < len(LISTED) or LISTED[number] not in among:
        raise wrong("a message of another rank")
    return _class_of(number)


@cache
def _class_of(number: int) -> Any:
    return class_of(*LISTED[number])


def _record(parts: list[Any]) -> Any:
    number, state = parts
    kind = _listed(number, FILLED)
    made = kind.__new__(kind)
    fill(made, state)
    return made


def _enum(parts: list[Any]) -> enum.Enum:
    number, value = parts
    return member(_listed(number, ENUMS), value)


def _named_tuple(parts: list[Any]) -> Any:
    number, *fields = parts
    return _listed(number, NAMED_TUPLES)._make(fields)


def _unlisted(parts: list[Any]) -> None:
    raise refused(_types(parts, STR)[0][:200])


#: tags whose parts are messages themselves
NESTED = frozenset(
    (*CONTAINERS.values(), "dict", "ordered dict", "range", "slice", "record", "named tuple", "checkpoint exception")
)
#: what makes a value of the parts behind a tag
TAGS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda parts: parts,
    "tuple": tuple,
    "set": lambda parts: _set(set, parts),
    "frozenset": lambda parts: _set(frozenset, parts),
    "dict": lambda parts: _mapping({}, parts),
    "ordered dict": lambda parts: _mapping(OrderedDict(), parts),
    "str": _text_from,
    "int": _int_from,
    "complex": lambda parts: complex(*_types(parts, REAL, REAL)),
    "bytearray": lambda parts: bytearray(*_types(parts, BYTES)),
    "range": lambda parts: range(*_types(parts, INT, INT, INT)),
    "slice": lambda parts: slice(*_types(parts, BOUND, BOUND, BOUND)),
    "path": lambda parts: PosixPath(_text_from(parts)),
    "pure path": lambda parts: PurePosixPath(_text_from(parts)),
    "stream": lambda parts: values.stream_from(*_types(parts, BYTES)),
    "stack": _stack,
    "tensor": _tensor,
    "array": _array,
    "size": values.size,
    "dtype": lambda parts: class_of("torch", *_types(parts, STR)),
    "device": lambda parts: values.device(*_types(parts, STR)),
    "layout": lambda parts: values.layout(*_types(parts, STR)),
    "checkpoint exception": lambda parts: values.checkpoint_exception(*parts),
    "error": lambda parts: values.error_from(*_types(parts, STR, STR)),
    "enum": _enum,
    "record": _record,
    "named tuple": _named_tuple,
    "unlisted": _unlisted,
}
