"""Reads pickles from other processes and programs as plain values.

torch's object collectives (all_gather_object and kin) and the `.metadata` of a torch_dist checkpoint are pickles, and a
pickle may name any function to be called, and hand any object a state.  The lists below hold exact pairs of module and
name, each with who writes it, as seen in saves and loads of Megatron-core 0.16.1 (Python 3.11) and 0.19.2 (Python 3.12)
with torch 2.13, of one to four ranks in all layouts.

Invariants: every step is one of this file's: a name is looked up in these lists, where it stands for something that
cannot be called (AttributeRecord, Enum, SafeMaker, or a kind of numbers); the class or function itself is never handed
to a pickle.  What is called is a function of `values.py`; what is given a state is a record that this same pickle has
just made, and takes it as plain attributes; what is a key can be hashed.
"""

from __future__ import annotations

import enum
import importlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath
from typing import Any, BinaryIO, ClassVar

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
        """The member with this value.

        Raises:
            UnpicklingError: if there is none.
        """
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
    # the common part of a checkpoint; custom functions
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


#: opcodes that no writer of these pickles needs: classes of Python 2, numbered names, references and buffers out of the
#: stream
UNUSED = (
    *(pickle.INST, pickle.OBJ, pickle.DICT, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
    *(pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.BYTEARRAY8),
)
ATOMS = frozenset((str, int, float, complex, bytes, bool, type(None)))
DEEP, LONG = (
    3,
    32,
)  #: tuples within tuples, and parts of each, that are keys: Python hashes them without a limit


class PlainUnpickler(pickle._Unpickler):
    """Reads a pickle of plain values.  Refused for any other; what a damaged one raises, pickle says.

    Python's unpickler in Python, half as fast as the one in C: only here can it be said what each step may do.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, fix_imports=False)
        self._empty: dict[int, Any] = {}  # records without attributes yet, by id; held, so that the id stays theirs

    def find_class(self, module: str, name: str) -> Any:
        """What the name stands for; Refused if it is not listed."""
        return look_up(module, name)

    def load_reduce(self) -> None:
        """A call."""
        parts = self.stack.pop()
        what = self.stack[-1]
        if type(parts) is not tuple or not isinstance(what, SafeMaker | Enum):
            raise refused(f"a call of a {type(what).__name__}")
        self.stack[-1] = what.make(*parts)

    def load_newobj(self) -> None:
        """An empty record."""
        parts = self.stack.pop()
        what = self.stack.pop()
        if parts != () or not isinstance(what, AttributeRecord):
            raise refused(f"an instance of a {type(what).__name__}")
        made = what.kind.__new__(what.kind)
        self._empty[id(made)] = made
        self.append(made)

    def load_build(self) -> None:
        """A record's attributes."""
        state = self.stack.pop()
        made = self.stack[-1]
        if self._empty.pop(id(made), None) is None:
            raise refused(f"a state of a {type(made).__name__}")
        _fill(made, state)

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1], self.stack[-3])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2], self.metastack[-1][-1])
        super().load_setitems()

    def load_additems(self) -> None:
        _check_keys(self.stack, self.metastack[-1][-1])
        super().load_additems()

    def load_frozenset(self) -> None:
        _check_keys(self.stack, set())
        super().load_frozenset()

    def load_append(self) -> None:
        _check_list(self.stack[-2])
        super().load_append()

    def load_appends(self) -> None:
        _check_list(self.metastack[-1][-1])
        super().load_appends()

    def load_unused(self) -> None:
        """Whatever torch and Megatron have no use for."""
        raise refused("an opcode that neither torch nor Megatron writes")

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        **dict.fromkeys((opcode[0] for opcode in UNUSED), load_unused),
    }


def read_plain(stream: BinaryIO) -> Any:
    """The value in a pickle; whatever a damaged pickle raises."""
    return PlainUnpickler(stream).load()


def _fill(made: Any, state: Any) -> None:
    """Give a record its attributes.

    Raises:
        UnpicklingError: for a state that none of them is written with.
    """
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if type(made).__name__ == "TensorProperties":
        kinds = (torch.dtype, torch.layout, bool, enum.Enum, bool)  # which its own __setstate__ takes
        if type(state) is not tuple or len(state) != len(kinds) or not all(map(isinstance, state, kinds)):
            raise wrong("TensorProperties")
        made.__setstate__(state)
        return
    if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
        raise wrong(type(made).__name__)
    hashed = state.get("fqn"), state.get("offset")
    if isinstance(made, MetadataIndex) and not (type(hashed[0]) is str and isinstance(hashed[1], torch.Size | None)):
        raise wrong("MetadataIndex")  # it is a key
    made.__dict__.update(state)


def _check_list(into: Any) -> None:
    if type(into) is not list:
        raise wrong("a list")


def _check_keys(keys: list[Any], into: Any) -> None:
    """Raise UnpicklingError unless `into` is a dict or set, and these keys can be hashed at once."""
    if not isinstance(into, dict | set) or not all(type(key) in ATOMS or _is_key(key, DEEP) for key in keys):
        raise wrong("a dict or set")


def _is_key(key: Any, depth: int) -> bool:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if isinstance(key, tuple | frozenset):  # torch.Size too
        return depth > 0 and len(key) <= LONG and all(_is_key(part, depth - 1) for part in key)
    known = (enum.Enum, PurePosixPath, torch.dtype)
    return type(key) in ATOMS or isinstance(key, known) or (isinstance(key, MetadataIndex) and "fqn" in key.__dict__)
