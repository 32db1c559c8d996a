"""Which post the members of a meeting use: as the meeting says, whatever a member would choose itself.

Invariant: a member that takes part has the same kind of post as all others.
"""

from __future__ import annotations

import base64
from concurrent.futures import TimeoutError as Late

import torch

from hpcrl.errors import DeadlineError
from hpcrl.weights.engine_fleet import in_thread
from hpcrl.weights.gloo_group import GlooGroup
from hpcrl.weights.pieces.device_memory import DeviceMemory, HostMemory
from hpcrl.weights.pieces.device_post import DevicePost
from hpcrl.weights.pieces.ipc_post import IpcPost, Shelf
from hpcrl.weights.pieces.nccl_wire import NcclWire
from hpcrl.weights.pieces.post import Post
from hpcrl.weights.pieces.wire import Meeting


def post_of(group: GlooGroup, me: int, meeting: Meeting, shelf: Shelf | None = None) -> Post:
    """A member's post, once it has joined the meeting's group; with NCCL the wire as well.

    shelf: for a sender's memory that other processes open.  DeadlineError if NCCL takes too long.
    """
    if meeting.ipc:
        return IpcPost(group, me, meeting.ranks, meeting.seconds, shelf=shelf or Shelf(memory_of(_current())))
    if not meeting.nccl:
        return Post(group, me, meeting.ranks, meeting.seconds)
    device = _current()
    name = base64.b64decode(meeting.nccl)
    joining = in_thread(lambda: NcclWire(name, me, meeting.world, device))
    try:
        return DevicePost(group, me, meeting.ranks, meeting.seconds, wire=joining.result(meeting.seconds))
    except Late:
        raise DeadlineError(
            f"not all members of the weight update came to NCCL within {meeting.seconds:.0f} s"
        ) from None


def _current() -> torch.device:
    """This thread's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def memory_of(device: torch.device) -> DeviceMemory:
    """What other processes can open of a device's memory."""
    if device.type == "cpu":
        return HostMemory()
    from hpcrl.weights.pieces.cuda_memory import CudaMemory

    return CudaMemory(device)
