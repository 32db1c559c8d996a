"""The list: every class of torch, Megatron-core and vLLM that a message of another rank, or a checkpoint's `.metadata`,
may hold, by exact module and name, each with who writes it, as seen in saves and loads of Megatron-core 0.16.1 (Python
3.11) and 0.19.2 (Python 3.12) with torch 2.13, of one to four ranks in all layouts.

Invariants: a name that is not listed is refused before anything is imported; a listed class is never called: its
instances are made empty and take their attributes, once and as plain values, without its own `__setstate__` or
`__init__` (`TensorProperties` apart, whose state is checked first); what is a key can be hashed.
"""

from __future__ import annotations

import enum
import importlib
from pathlib import PurePosixPath
from typing import Any

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
}
#: the same, of messages alone
SENT = {
    # which rank has which shard (Megatron's validation.py and exchange_utils.py)
    ("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedTensor"),
    # the settings in the common part of a checkpoint, which ranks compare before a save (validation.py)
    ("argparse", "Namespace"),
    # where the workers of an engine find their queue in shared memory (vLLM's shm_broadcast.py)
    ("vllm.distributed.device_communicators.shm_broadcast", "Handle"),
}
FILLED = RECORDS | SENT
#: the same as named tuples: tensors that the workers of an engine are about to send (vLLM's parallel_state.py)
NAMED_TUPLES = {("vllm.distributed.parallel_state", "TensorMetadata")}
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
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}
ATOMS = frozenset((str, int, float, complex, bytes, bool, type(None)))
#: tuples within tuples, and parts of each, that are keys: Python hashes them without a limit
DEEP = 3
LONG = 32


def class_of(module: str, name: str) -> Any:
    """The class, or torch's dtype, of a listed name.

    Raises:
        Refused: if it is not listed; then nothing was imported either.
    """
    pair = (module, name)
    if pair in FILLED or pair in NAMED_TUPLES or pair in ENUMS or (module == "torch" and name in DTYPES):
        return getattr(importlib.import_module(module), name)
    raise refused(f"{module}.{name}"[:200])


def state_of(record: Any) -> Any:
    """The attributes of a record, as `fill` takes them."""
    return record.__getstate__() if type(record).__name__ == "TensorProperties" else record.__dict__


def fill(made: Any, state: Any) -> None:
    """Give a record its attributes.

    Raises:
        UnpicklingError: for a state that none of them is written with.
    """
    if type(made).__name__ == "TensorProperties":
        import torch

        kinds = (torch.dtype, torch.layout, bool, enum.Enum, bool)  # which its own __setstate__ takes
        if type(state) is not tuple or len(state) != len(kinds) or not all(map(isinstance, state, kinds)):
            raise wrong("TensorProperties")
        made.__setstate__(state)
        return
    if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
        raise wrong(type(made).__name__)
    if type(made).__name__ == "MetadataIndex" and not _has_hash(state):
        raise wrong("MetadataIndex")
    made.__dict__.update(state)


def _has_hash(state: dict[str, Any]) -> bool:
    """Whether a MetadataIndex with these attributes can be a key: it hashes the first two."""
    import torch

    return type(state.get("fqn")) is str and isinstance(state.get("offset"), torch.Size | None)


def member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    """The member of an enumeration with this value.

    Raises:
        UnpicklingError: if there is none.
    """
    if type(value) not in (int, str) or value not in kind._value2member_map_:
        raise wrong(kind.__name__)
    return kind(value)


def check_keys(keys: list[Any], into: Any) -> None:
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
