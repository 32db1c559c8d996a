"""Which transport the members of an update group use.

Invariant: the group's description decides, not the member's own state: all members have the same kind of transport.
"""

from __future__ import annotations

import base64
import contextlib
from concurrent.futures import Future, wait

import torch

from hpcrl.engine.membership.broadcast import in_thread
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.pieces.device_memory import CudaMemory, DeviceMemory, HostMemory
from hpcrl.weights.pieces.device_transport import DeviceTransport, NcclWire
from hpcrl.weights.pieces.ipc_transport import ExportedMemory, IpcTransport
from hpcrl.weights.pieces.peer_transport import GLANCE, GlooGroup, PeerTransport, has_left
from hpcrl.weights.pieces.wire import UpdateGroup


def choose_transport(
    group: GlooGroup,
    me: int,
    update_group: UpdateGroup,
    device: torch.device,
    exported_memory: ExportedMemory | None = None,
) -> PeerTransport:
    """A member's transport, once it has joined the group; with NCCL the wire as well.

    Args:
        device: of the weights (`current_device`).
        exported_memory: for a sender's memory that other processes open.

    Raises:
        DeadlineError: if NCCL takes too long.
    """
    members = group, me, update_group.ranks, update_group.seconds
    if update_group.ipc:
        wire = (
            _joined(update_group, me, update_group.ranks, device, group)
            if update_group.nccl and me < update_group.ranks
            else None
        )
        return IpcTransport(*members, wire=wire, exported_memory=exported_memory or ExportedMemory(memory_of(device)))
    if not update_group.nccl:
        return PeerTransport(*members)
    return DeviceTransport(*members, wire=_joined(update_group, me, update_group.world, device, group))


def _joined(update_group: UpdateGroup, me: int, world: int, device: torch.device, group: GlooGroup) -> NcclWire:
    """NCCL's wire.

    Args:
        group: a member that will not come says so in its store.

    Raises:
        DeadlineError: if not all members come to it in time.
        PeerError: if one has left.
    """
    joining = in_thread(lambda: NcclWire(base64.b64decode(update_group.nccl), me, world, device))
    end = Deadline(update_group.seconds)
    while wait([joining], timeout=GLANCE).not_done:
        if end.over or has_left(group.store):
            joining.add_done_callback(_close)  # NCCL has no deadline: what comes of it after all is ended
            if end.over:
                raise DeadlineError(
                    f"not all members of the weight update joined NCCL within {update_group.seconds:.0f} s"
                )
            raise PeerError("a member left before all had joined NCCL")
    return joining.result()


def _close(joined: Future[NcclWire]) -> None:
    if joined.exception() is None:
        joined.result().close()


def current_device() -> torch.device:
    """This thread's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """As the current one of this thread, which began on GPU 0."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def memory_of(device: torch.device) -> DeviceMemory:
    """What other processes can open of a device's memory."""
    return HostMemory() if device.type == "cpu" else CudaMemory(device)
