"""Pickles that others wrote, which torch and Megatron send between ranks and keep beside checkpoints: read, and not obeyed.

torch's object collectives (all_gather_object and kin) and the `.metadata` of a torch_dist checkpoint are pickles, and a
pickle may name any function to be called.  Invariant: what is read here builds plain values, tensors, and the records of
torch's and Megatron's checkpoints, and calls nothing else.  hpcrl itself writes none, and reads none anywhere else.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from typing import Any, BinaryIO

from hpcrl.errors import HpcrlError

#: what builds a value and does nothing else, by module
PLAIN = {
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "datetime": {"timedelta"},
    "io": {"BytesIO"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "Tensor", "device"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    "traceback": {"FrameSummary", "StackSummary"},
    "types": {"SimpleNamespace"},
}
#: under which names torch, and newer versions of Megatron-core, pickle a tensor's memory
STORAGES = {("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")}
#: where records (dataclasses, enumerations, named tuples) are plain data too
RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.dist_checkpointing.")
#: where errors come from that one rank tells another
ERRORS = ("builtins", "torch.distributed.checkpoint.api", "megatron.core.dist_checkpointing.core", "hpcrl.errors")


class Refused(HpcrlError, pickle.UnpicklingError):
    """A pickle names something that is no plain value."""


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of plain values.  Refused for any other; what a damaged one raises, pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in STORAGES:
            return _storage
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" or module.startswith(RECORDS) or module in ERRORS:
            found = super().find_class(module, name)
            if _is_plain(found):
                return found
        raise Refused(
            f"a message of another rank, or a checkpoint's .metadata, names {module}.{name}, which is no plain value",
            "between ranks, own functions may send numbers, texts, lists, dicts and tensors",
        )


def _is_plain(found: Any) -> bool:
    import torch

    if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        return True
    if not isinstance(found, type):
        return False
    record = dataclasses.is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    return record or issubclass(found, enum.Enum | BaseException)


def _storage(data: bytes) -> Any:
    """A tensor's memory, as torch pickles it into a pickle: read by torch's own reader of plain values."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def read_plain(stream: BinaryIO) -> Any:
    """The value in a pickle; whatever a damaged pickle raises."""
    return PlainUnpickler(stream).load()


def refuse_foreign_pickles() -> None:
    """Have torch's object collectives in this process read by the rules above.  HpcrlError if torch has no such place."""
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_unpickler"):
        raise HpcrlError("this version of torch does not say how it reads what ranks send one another", "see docs/install.md")
    distributed_c10d._unpickler = PlainUnpickler
