"""What the members of an update tell one another once: plain values, as JSON.

Members have numbers: trainer ranks first, then workers.  A *destination host* is a host with workers; a message is what
one sender has for one of them in one round.  It is *near* if it is in memory of the sender, on the same host;
otherwise it comes over a socket to one of the host's workers, the *host leader*, into memory that the others there map,
or to a rank there, whose message it then is.
A *manifest* is what a worker says of itself before the first update (`WorkerExtension.hpcrl_manifest`).

Invariant: there is one answer to which part of a tensor a worker holds (`span`).
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hpcrl.utils.untrusted_files import read_system

#: kinds of messages; between two members those of a kind keep their order
READY = 0
DONE = 1
DATA = 2
HALVES = 2  #: rounds that may be under way


def round_bytes(limit: int, hosts: Sequence[str], through_ranks: bool) -> int:
    """What a rank packs in a round, and takes in for its host, if `limit` is to hold all rounds that are under way."""
    return limit // HALVES // (2 if through_ranks and len(set(hosts)) > 1 else 1)


class WireTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor that is sent in pieces: name, dtype (torch's name), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pieces of one sender for one destination host in one round.

    Attributes:
        half, offset: where they begin in the sender's memory if near, otherwise in the host leader's.
        pieces: (tensor, top, bottom, left, right, offset in the message).
    """

    sender: int
    near: bool
    half: int
    offset: int
    nbytes: int
    pieces: tuple[tuple[int, int, int, int, int, int], ...]


class ReceivePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that reaches a destination host.

    Attributes:
        limit: bytes of a half of a memory.
    """

    host_leader: int
    workers: tuple[int, ...]
    limit: int
    tensors: tuple[WireTensor, ...]
    rounds: tuple[tuple[Message, ...], ...]

    def messages(self) -> Iterator[Message]:
        """All, in order of rounds."""
        for messages in self.rounds:
            yield from messages


class UpdateGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store at which the members of an update meet: `world` members, trainer ranks below `ranks`.

    Attributes:
        nccl: NCCL's unique id of the group over which bytes go (base64), or "" if they go over gloo. With ipc its
            members are the ranks alone.
        ipc: bytes are in memory of the ranks' devices, which the workers of their host open.
    """

    host: str
    port: int
    world: int
    ranks: int
    seconds: float
    nccl: str = ""
    ipc: bool = False


class WorkerJoinCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message to an engine's workers when they join.

    Attributes:
        workers: for each worker, by its name in the engine, its (number in the group, index into receive_plans).
    """

    update_group: UpdateGroup
    receive_plans: tuple[ReceivePlan, ...]
    workers: dict[str, tuple[int, int]]


def write_join_command(command: WorkerJoinCommand) -> str:
    """As text: JSON, compressed (a tenth is left of names and numbers that are so much alike), in base64."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(command), 1)).decode()


def read_join_command(text: str) -> WorkerJoinCommand:
    """What `write_join_command` wrote."""
    return msgspec.json.decode(zlib.decompress(base64.b64decode(text)), type=WorkerJoinCommand)


def process_identity() -> str:
    """The same text in processes that can open each other's memory: same kernel, host name and PID namespace."""
    boot = read_system("/proc/sys/kernel/random/boot_id").strip()
    return f"{os.uname().nodename}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def span(worker: Mapping[str, Any], name: str, shape: Sequence[int]) -> tuple[Any, Any]:
    """(rows, columns or None for all) of a tensor of that shape which a worker needs; all of it where only its loader
    knows."""
    held = worker["tensors"].get(name) or worker.get("cuts", {}).get(name)
    if held is not None:
        return held["rows"], held["columns"]
    return ([[0, shape[0]]] if shape else []), None
