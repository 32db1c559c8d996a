"""NCCL between trainer ranks and engine workers: grouped sends and receives on one stream.

vLLM's own binding of NCCL is used at both ends, as --weight-update gathered does; members are named by rank 0, which
tells the name under each engine's key.  This module has run on no GPU yet.

Invariants: groups are started on the stream on which tensors are packed and loaded, so neither waits for the other but
on the device; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class NcclWire:
    """Member `rank` of `world`; name: NCCL's, 128 bytes."""

    def __init__(self, name: bytes, rank: int, world: int, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        with torch.cuda.device(device):
            self.device = device
            self.communicator = uid_init_process_group(name, rank, world, device)

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Any:
        with torch.cuda.device(self.device):  # another thread begins on GPU 0
            stream = torch.cuda.current_stream()
            done = torch.cuda.Event()
            self.communicator.group_start()
            try:
                for tensor, member in sends:
                    self.communicator.send(tensor, member, stream)
                for tensor, member in receives:
                    self.communicator.recv(tensor, member, stream)
            finally:
                self.communicator.group_end()
            done.record(stream)
        return done

    def close(self) -> None:
        self.communicator.destroy()  # aborts, and waits 5 s for that at most
