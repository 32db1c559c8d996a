"""The one place where torch and vLLM are told to read with hpcrl's readers: what ranks and workers send one another,
and `.metadata`.

Invariants: in a process in which `refuse_foreign_pickles` was called, torch's object collectives neither write nor read
pickles, and neither torch nor Megatron-core unpickles a checkpoint's `.metadata`: they are handed the values that
`reader.py` has read, so that no other reader comes to see the file, changed in between or not.  The same holds for what
vLLM pickles itself to send it over a group or a store, where `refuse_foreign_pickles_of_vllm` was called.
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.pickles.messages import MessageReader, MessageWriter
from hpcrl.pickles.reader import read_plain


class MetadataPickles:
    """Takes the place of the module pickle where torch reads and writes `.metadata`."""

    dump = staticmethod(pickle.dump)
    load = staticmethod(read_plain)


class MessagePickles:
    """Takes the place of the module pickle where vLLM makes bytes of an object to send them."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """As a message."""
        stream = io.BytesIO()
        MessageWriter(stream).dump(value)
        return stream.getvalue()

    @staticmethod
    def loads(data: bytes) -> Any:
        """The value of a message; UnpicklingError for anything else."""
        return MessageReader(io.BytesIO(data)).load()


def refuse_foreign_pickles() -> None:
    """Have torch's object collectives, and its reader of checkpoints, in this process read plain values alone.

    Raises:
        HpcrlError: if torch has no such place.
    """
    _put("torch.distributed.distributed_c10d", "_pickler", MessageWriter)
    _put("torch.distributed.distributed_c10d", "_unpickler", MessageReader)
    _put("torch.distributed.checkpoint.filesystem", "pickle", MetadataPickles)


def refuse_foreign_pickles_of_vllm() -> None:
    """The same in a process of an engine, and for what vLLM sends by itself over a group or a store.

    Raises:
        HpcrlError: if torch or vLLM has no such place.
    """
    refuse_foreign_pickles()
    _put("vllm.distributed.parallel_state", "pickle", MessagePickles)
    _put("vllm.distributed.utils", "pickle", MessagePickles)


def _put(module: str, name: str, ours: Any) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise HpcrlError(
            f"this version of {module.partition('.')[0]} has no {module}.{name}, through which hpcrl keeps the "
            "messages of strangers from being run",
            "docs/install.md lists the versions that were tried",
        )
    setattr(found, name, ours)
