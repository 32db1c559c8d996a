"""Values that ranks send one another and that checkpoints hold, and pickles that do harm."""

from __future__ import annotations

import builtins
import enum
import io
import os
import pickle
import traceback
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from hpcrl.transport.pickles import records, values


class Calls:
    """Pickled, a call of `what` with these arguments, and what it gives is handed `state` and `items`, if any."""

    def __init__(self, what: Callable[..., Any], *args: Any, state: Any = None, items: Any = None) -> None:
        self.call = (what, args, state, items)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@dataclass
class Acts:
    """As torch and its neighbours have them: a record that does something when it is made."""

    path: str

    def __post_init__(self) -> None:
        os.mkdir(self.path)


class ActingError(Exception):
    """Likewise an error."""

    def __init__(self, path: str) -> None:
        os.mkdir(path)


class Keyed(type):
    """As networkx has it: what runs the names of the arguments that it is called with."""

    def __call__(cls, path: str) -> None:
        exec(f"__import__('os').mkdir({path!r})")


class Config(metaclass=Keyed):
    """Likewise."""


def by_name(module: str, name: str, argument: str) -> bytes:
    """The pickle of a call of `module`.`name`, dots and all, with one text."""
    text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + text + b"\x93X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85R."


def attacks(made: Path) -> dict[str, Any]:
    """Each makes a directory when it is unpickled freely, or is a step on the way of one that does."""
    inner = io.BytesIO()
    torch.save(Calls(os.mkdir, str(made)), inner)
    dtype = Calls(np.dtype, "O", state=(3, "|", None, None, None, 8, 1, 0))
    return {
        "mkdir": Calls(os.mkdir, str(made)),
        "deep": {"plan": [(1, OrderedDict(a=Calls(os.mkdir, str(made))))]},
        "eval": Calls(builtins.eval, f"__import__('os').mkdir({str(made)!r})"),
        "exec": Calls(builtins.exec, f"open({str(made)!r}, 'w')"),
        "torch": Calls(torch.storage._load_from_bytes, inner.getvalue()),
        "torch.load": Calls(torch.load, io.BytesIO(inner.getvalue()), None, None),
        "hub": Calls(torch.hub.load, "x", "y"),
        "dataclass": Calls(Acts, str(made)),
        "error": Calls(ActingError, str(made)),
        "numpy dtype": dtype,
        "numpy scalar": Calls(np._core.multiarray.scalar, dtype, b"A" * 8),
        "numpy array": np.array([1, "x"], dtype=object),
        "factory": defaultdict(OrderedDict),
        "attribute": SimpleNamespace(check=OrderedDict),
        "getattr": Calls(getattr, WriteItemType, "mro"),
        "getattr, dotted": Calls(getattr, WriteItemType, "__class__.mro"),
        "getattr of os": Calls(getattr, OrderedDict, "fromkeys"),
        "new enumeration": Calls(WriteItemType, "Other", ["a"]),
        "state of a member": Calls(WriteItemType, 1, state={"_value_": 9}),
        "slots of a member": Calls(WriteItemType, 1, state=(None, {"_name_": "x"})),
        "method of a member": Calls(WriteItemType, 1, state={"__reduce_ex__": OrderedDict}),
        "state of a path": Calls(PurePosixPath, "a", state=(None, {"_str": "b"})),
        "record by call": Calls(Namespace),
        "file read by a stack": traceback.StackSummary.from_list([("/etc/hostname", 1, "f", None)])[0],
        "tensor of a module": Calls(values.tensor_from, b"", (0,), "onnx"),
        "array of pointers": Calls(values.array_from, b"A" * 8, "|O8", (1,)),
        "error of a class": Calls(values.error_from, "SystemExit", ("x",)),
        "layout": Calls(torch.serialization._get_layout, "torch.nn"),
    }


def plain() -> list[Any]:
    """One of everything that may be sent or stored."""
    stack = traceback.extract_stack(limit=2)
    index = MetadataIndex("weight", torch.Size([0, 1]), 1)
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    written = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), size)
    shard = ShardedTensor("w", None, torch.float32, (2, 3), (4, 3), (0, 0), (2, 1), (0, 0, 1))
    return [
        {
            "a": [1, 2.5, "x", b"y", None, True, (1, 2)],
            3: {4},
            "r": range(3),
            "s": slice(1, None),
            ("k", (1, 2)): frozenset({5}),
        },
        [1j, bytearray(b"ab"), OrderedDict(a=1), Path("/a/b"), PurePosixPath("c"), 1 << 100, -(1 << 40)],
        OrderedDict(a=torch.float32, b=size, c=torch.strided, d=torch.device("cuda", 1), e=torch.device("cpu")),
        [getattr(torch, name) for name in sorted(records.DTYPES)],
        [
            torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.ones(2, 3).t(),
        ],
        [np.arange(4, dtype=np.float32), np.float64(1.5), np.int64(3), np.zeros((0, 2), np.int8)],
        np.random.get_state(),
        Namespace(a=1, dtype=torch.bfloat16),
        Metadata(
            {
                "weight": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [chunk]),
                "rng": BytesStorageMetadata(),
            },
            planner_data={"weight": ("model", "weight")},
            storage_data={index: _StorageInfo("__0_0.distcp", 0, 10)},
            storage_meta=StorageMeta(Path("/a"), "id"),
        ),
        OldProperties(dtype=torch.float16),
        SavePlan(
            [
                WriteItem(index, WriteItemType.SHARD, None, written),
                WriteItem(index, WriteItemType.BYTE_IO, BytesIOWriteData(3)),
            ]
        ),
        LoadPlan([ReadItem(LoadItemType.TENSOR, index, torch.Size([0]), index, torch.Size([0]), size)]),
        WriteResult(index, 10, _StorageInfo("__0_0.distcp", 0, 10)),
        [shard, ShardedObject("rng", None, (1,), (0,), 0)],
        [RuntimeError("disk full"), stack],
        CheckpointException("write", {1: (OSError("disk full"), stack)}),
    ]


def in_metadata() -> list[Any]:
    """Of these, what a checkpoint's `.metadata` may hold."""
    kinds = (Metadata, OldProperties, SavePlan, LoadPlan, WriteResult)
    return [value for value in plain() if isinstance(value, kinds)]


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, attributes and classes included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and not isinstance(one, traceback.StackSummary):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseException):
        return str(one) == str(other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return (
        same(sorted(vars(one).items()), sorted(vars(other).items())) if isinstance(one, ShardedTensor) else one == other
    )


def as_python_3_11_2(value: Any) -> bytes:
    """Pickled as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    class Older(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    stream = io.BytesIO()
    Older(stream, 4).dump(value)
    return stream.getvalue()
