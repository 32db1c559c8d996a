"""Writes what ranks send one another through torch's object collectives, so that `reader.py` reads it.

Invariant: tensors, arrays and errors of whatever class are written in names of `values.py`; all else as Python does.
"""

from __future__ import annotations

import io
import pickle
import traceback
from typing import Any, BinaryIO

from hpcrl.errors import HpcrlError
from hpcrl.pickles import values
from hpcrl.pickles.reader import PlainUnpickler

PROTOCOL = 4  #: what torch writes with Python 3.11 to 3.13; protocol 5 has out-of-band buffers, which are not needed


class PlainPickler(pickle.Pickler):
    """Pickles a value for `PlainUnpickler`."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        """How one value is written, as __reduce__ says it; NotImplemented: as Python does."""
        import numpy as np
        import torch
        from torch.distributed.checkpoint.api import CheckpointException

        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            return values.tensor_from, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))
        if isinstance(value, np.ndarray | np.generic) and value.dtype.str in values.ARRAYS:
            return values.array_from, (value.tobytes(), value.dtype.str, value.shape)
        if isinstance(value, io.BytesIO):
            return values.stream_from, (value.getvalue(),)
        if isinstance(value, CheckpointException):
            return CheckpointException, value.args
        if isinstance(value, BaseException):
            kind = type(value)
            name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            return values.error_from, (name, str(value))
        if isinstance(value, traceback.StackSummary):
            return values.stack_from, ([(one.filename, one.lineno or 0, one.name, one.line or "") for one in value],)
        return NotImplemented


def refuse_foreign_pickles() -> None:
    """Have torch's object collectives in this process written and read by these rules.

    Raises:
        HpcrlError: if torch has no such place.
    """
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_unpickler") or not hasattr(distributed_c10d, "_pickler"):
        raise HpcrlError(
            "this version of torch does not say how it reads what ranks send one another", "see docs/install.md"
        )
    distributed_c10d._pickler = PlainPickler
    distributed_c10d._unpickler = PlainUnpickler
