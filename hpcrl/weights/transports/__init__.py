"""The ways for a model's tensors to reach the engines: a file each, named as --weight-transfer names it.

    shm     copied once into memory that all engines of the host map; done before generation is paused.
            Holds one copy of the whole model in host memory.
    gloo    broadcast over TCP, a bucket at a time; holds one bucket.
    nccl    pieces alone, from GPU to GPU.
    disk    a directory of safetensors on a file system that the engines have too; done before generation is paused.
    ipc     pieces alone, in GPU memory that engines on the same GPUs open.

To add a way, add a file with `BACKEND` (vLLM's name of the weight-transfer backend), `obstacle` and `make`; the
receiving end is a file of the same name in engine/receivers/.

Invariant of every way: a bucket's memory is not touched again before every engine has what it needs of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpcrl.engines.fleet import EngineBroadcast
from hpcrl.errors import PeerError, UsageError
from hpcrl.toolbox.plugins import PluginFolder

if TYPE_CHECKING:
    import torch

Stream = Iterator[tuple[str, "torch.Tensor"]]
ROOM = PluginFolder(Path(__file__).parent)


@dataclass(frozen=True)
class Link:
    """What a transport connects.

    Attributes:
        limit: bytes of a bucket.
        host: address of the sending rank.
        workers: how many each engine has.
        directory: on a file system that engines have too, or None for the run's.
        written: called with each directory that is complete.
    """

    fleet: EngineBroadcast
    limit: int
    host: str
    workers: list[int]
    directory: str | None = None
    written: Callable[[Path, EngineBroadcast], None] | None = None

    def first_ranks(self) -> list[int]:
        """The rank of each engine's first worker in a group where the trainer is rank 0."""
        return [1 + sum(self.workers[:i]) for i in range(len(self.workers))]


@dataclass(frozen=True)
class TransportConditions:
    """What decides whether a way can work.

    Attributes:
        cpu: the engines run vLLM's CPU build.
        one_host: all of the run is on one.
        colocate: trainer and engines share GPUs.
        from_host: what is sent is in host memory: whole tensors, or what has changed.
    """

    cpu: bool
    one_host: bool
    colocate: bool
    from_host: bool = False


class Transport(Protocol):
    """How tensors travel; `bytes` counts those of the last update."""

    bytes: int

    def connect(self) -> None:
        """Once, before the first update."""

    def stage(self, tensors: Stream, version: int) -> None:
        """What can be done while the engines still generate."""

    def send(self) -> None:
        """The rest, while they are paused: the update phase of all engines."""

    def close(self) -> None: ...


class TransportModule(Protocol):
    """What a file of this room holds."""

    BACKEND: str  #: vLLM's name of the weight-transfer backend

    def obstacle(self, site: TransportConditions) -> str | None:
        """Why it cannot work at this site, as the end of the sentence "--weight-transfer NAME ..."; None if it can."""

    def make(self, link: Link) -> Transport: ...


def names() -> list[str]:
    """Every way that there is a file for, sorted."""
    return [*ROOM.names()]


def find_transport(name: str) -> TransportModule:
    """The way of that name.

    Raises:
        UsageError: if there is no such file.
    """
    if name not in names():
        raise UsageError(f"--weight-transfer {name} is not a transport", ROOM.hint(name, also=["auto"]))
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]


def choose(wish: str, site: TransportConditions) -> str:
    """The name of the way to take.

    Raises:
        UsageError: when `wish` asks for one that cannot work at this site.
    """
    if wish == "auto":
        if site.cpu or site.from_host:
            wish = "shm" if site.one_host else "gloo"
        else:
            wish = "ipc" if site.colocate else "nccl"
    if why := find_transport(wish).obstacle(site):
        others = [name for name in names() if not find_transport(name).obstacle(site)]
        raise UsageError(f"--weight-transfer {wish} {why}", f"use auto or {' or '.join(others)}")
    return wish


def make_transport(backend: str, link: Link) -> Transport:
    """The sending end for what the engines say that they receive with."""
    for way in map(find_transport, names()):
        if backend == way.BACKEND:
            return way.make(link)
    raise PeerError(f"the engines receive with {backend}, which is not one of ours")


class NoTransport:
    """For engines that take pieces alone."""

    bytes = 0

    def __init__(self, link: Link) -> None:
        self.fleet = link.fleet

    def connect(self) -> None:
        self.fleet.post("the weight transfer's init", "/init_weight_transfer_engine", {"init_info": {}})

    def stage(self, tensors: Stream, version: int) -> None:
        raise UsageError("the engines take pieces alone", "start them with --weight-update gathered")

    def send(self) -> None:
        pass

    def close(self) -> None:
        pass
