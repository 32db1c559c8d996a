"""The one place where torch is told to read with hpcrl's readers: what ranks send one another, and `.metadata`.

Invariants: in a process in which `refuse_foreign_pickles` was called, torch's object collectives neither write nor read
pickles, and neither torch nor Megatron-core unpickles a checkpoint's `.metadata`: they are handed the values that
`reader.py` has read, so that no other reader comes to see the file, changed in between or not.
"""

from __future__ import annotations

import pickle
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.pickles.messages import MessageReader, MessageWriter
from hpcrl.pickles.reader import read_plain


class MetadataPickles:
    """Takes the place of the module pickle where torch reads and writes `.metadata`."""

    dump = staticmethod(pickle.dump)
    load = staticmethod(read_plain)


def refuse_foreign_pickles() -> None:
    """Have torch's object collectives, and its reader of checkpoints, in this process read plain values alone.

    Raises:
        HpcrlError: if torch has no such place.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint import filesystem

    places: tuple[tuple[Any, str, Any], ...] = (
        (distributed_c10d, "_pickler", MessageWriter),
        (distributed_c10d, "_unpickler", MessageReader),
        (filesystem, "pickle", MetadataPickles),
    )
    for module, name, ours in places:
        if not hasattr(module, name):
            raise HpcrlError(
                f"this version of torch has no {module.__name__}.{name}, through which hpcrl keeps the messages of "
                "strangers from being run",
                "which torch is installed? docs/install.md lists those that were tried",
            )
        setattr(module, name, ours)
