"""The device of a trainer rank, and the processors beside it.

Invariant: GPUs that are there are used, or it is an error that they cannot be.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hpcrl.errors import UsageError
from hpcrl.plan import NO_GPUS
from hpcrl.processors import SYSTEM, bind_beside


def cuda_is_there(visible: str | None) -> bool:
    """Whether to compute on GPUs.

    visible: CUDA_VISIBLE_DEVICES.  UsageError, with torch's own reason, if it names GPUs, torch is a CUDA build, and
    yet none can be used, as with too old a driver: the run would go on, a thousand times slower.
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


def stay_beside(device: torch.device, system: Path = SYSTEM) -> frozenset[int]:
    """Keep this process on the processors of its GPU's NUMA node; which these are, none if nothing was changed."""
    found = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # of AMD's, with some builds
        return frozenset()
    return bind_beside(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0", system)
