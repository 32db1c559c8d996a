"""Which names a pickle may hold: exact pairs of module and name, each with who writes it.

Seen in saves and loads of Megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12) with torch 2.13, of one to four
ranks in all layouts.
Invariant: a name stands for something that cannot be called (AttributeRecord, Enum, SafeMaker, or a kind of numbers);
the class or function itself is never handed to a pickle.
"""

from __future__ import annotations

import enum
import importlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath
from typing import Any

from hpcrl.pickles import values
from hpcrl.pickles.values import refused, wrong

CHECKPOINT = "torch.distributed.checkpoint."
METADATA = CHECKPOINT + "metadata"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
#: records whose attributes are plain values
RECORDS = {
    # .metadata; plans of a load hold MetadataIndex too
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorProperties"),
    (METADATA, "TensorStorageMetadata"),
    (SHARDED, "TensorProperties"),  # .metadata of torch before 2.3
    # .metadata, and what ranks tell one another after a save (Megatron's state_dict_saver.py)
    (CHECKPOINT + "filesystem", "_StorageInfo"),
    (CHECKPOINT + "storage", "WriteResult"),
    # who writes and reads what (state_dict_saver.py; torch's own load)
    (CHECKPOINT + "planner", "BytesIOWriteData"),
    (CHECKPOINT + "planner", "LoadPlan"),
    (CHECKPOINT + "planner", "ReadItem"),
    (CHECKPOINT + "planner", "SavePlan"),
    (CHECKPOINT + "planner", "TensorWriteData"),
    (CHECKPOINT + "planner", "WriteItem"),
    # which rank has which shard (Megatron's validation.py and exchange_utils.py)
    ("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedTensor"),
    # the settings in the common part of a checkpoint, which ranks compare before a save (validation.py)
    ("argparse", "Namespace"),
}
#: enumerations in the records above
ENUMS = {
    (METADATA, "_MEM_FORMAT_ENCODING"),
    (SHARDED, "MEM_FORMAT_ENCODING"),
    (CHECKPOINT + "planner", "LoadItemType"),
    (CHECKPOINT + "planner", "WriteItemType"),
}
#: torch's kinds of numbers: of shards, and of tensors that are sent
DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "complex64", "complex128"),
    *(
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
}


@dataclass(frozen=True)
class AttributeRecord:
    """A class whose instances are made empty and then take their attributes, once."""

    kind: type


@dataclass(frozen=True)
class Enum:
    """An enumeration, one of whose members is asked for."""

    kind: type[enum.Enum]

    def make(self, value: Any) -> enum.Enum:
        """The member with this value; UnpicklingError if there is none."""
        if type(value) not in (int, str) or value not in self.kind._value2member_map_:
            raise wrong(self.kind.__name__)
        return self.kind(value)


@dataclass(frozen=True)
class SafeMaker:
    """A function of hpcrl's own, which checks what it is given."""

    make: Callable[..., Any]


def _member(of: Any, name: Any) -> enum.Enum:
    if not isinstance(of, Enum) or type(name) is not str or name not in of.kind.__members__:
        raise refused("builtins.getattr of something that is not a member of a listed enumeration")
    return of.kind.__members__[name]


OURS = values.__name__
MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    # members of the enumerations above as Python 3.11.0 to 3.11.3 pickle them (Debian 12): getattr(the class, the name)
    ("builtins", "getattr"): _member,
    # .metadata, and everything that speaks of shards
    ("torch", "Size"): values.size,
    ("torch.serialization", "_get_layout"): values.layout,
    ("pathlib", "PosixPath"): values.plain(PosixPath, str),  # StorageMeta, where the directory was given as a path
    # the common part of a checkpoint; own functions
    ("collections", "OrderedDict"): values.plain(OrderedDict),
    ("builtins", "bytearray"): values.plain(bytearray, bytes),
    ("builtins", "complex"): values.plain(complex, float),
    ("builtins", "range"): values.plain(range, int),
    ("builtins", "slice"): values.plain(slice, int, type(None)),
    ("pathlib", "PurePosixPath"): values.plain(PurePosixPath, str),
    # that some ranks failed
    (CHECKPOINT + "api", "CheckpointException"): values.checkpoint_exception,
    # what writer.py makes of tensors, arrays (both in random-number states), files in memory, errors and their stacks
    (OURS, "tensor_from"): values.tensor_from,
    (OURS, "array_from"): values.array_from,
    (OURS, "stream_from"): values.stream_from,
    (OURS, "error_from"): values.error_from,
    (OURS, "stack_from"): values.stack_from,
}


def look_up(module: str, name: str) -> Any:
    """What this name stands for.  Refused if it is not listed: then nothing was imported either."""
    pair = (module, name)
    if pair in MAKERS:
        return SafeMaker(MAKERS[pair])
    if pair in RECORDS:
        return AttributeRecord(getattr(importlib.import_module(module), name))
    if pair in ENUMS:
        return Enum(getattr(importlib.import_module(module), name))
    if module == "torch" and name in DTYPES:
        return getattr(importlib.import_module(module), name)
    raise refused(f"{module}.{name}"[:200])
