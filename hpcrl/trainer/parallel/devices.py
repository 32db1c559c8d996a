"""The device of a trainer rank.

Invariant: GPUs that are there are used, or it is an error that they cannot be.
"""

from __future__ import annotations

import torch

from hpcrl.errors import UsageError
from hpcrl.plan import NO_GPUS


def cuda_is_there(visible: str | None) -> bool:
    """Whether to compute on GPUs.

    visible: CUDA_VISIBLE_DEVICES.  UsageError, with torch's own reason, if it names GPUs, torch is a CUDA build, and yet
    none can be used, as with too old a driver: the run would go on, a thousand times slower.
    """
    if torch.cuda.is_available():
        return True
    if torch.version.cuda and visible is not None and visible not in NO_GPUS:
        try:
            torch.cuda.init()
            reason = "torch finds no device"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
        raise UsageError(
            f"this host gives the trainer GPUs (CUDA_VISIBLE_DEVICES={visible}), and CUDA {torch.version.cuda} cannot use them:"
            f" {reason}",
            "does nvidia-smi work here, and is its driver new enough (docs/install.md)? CUDA_VISIBLE_DEVICES= runs on the CPU",
        )
    return False


def device_index(local: int, count: int) -> int:
    """The number of a rank's GPU among the `count` that it sees: its local rank, or 0 where it is bound to its own."""
    return 0 if count == 1 else local
