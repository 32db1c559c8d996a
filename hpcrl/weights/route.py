"""How the weight updates of a run travel, from its options and hosts; `hpcrl plan` prints what a run then does.

Invariant: an update that a run sends in pieces is one that `route` predicts so.  Only an engine can tell that it cannot
be, since a layer of vLLM's does not say how it holds its weights (`pieces/resharded_update.py`); the run's log then
says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.options import Options
from hpcrl.plan import Plan
from hpcrl.weights.transports import TransportConditions, TransportModule, choose, find_transport

Sharing = Literal["host", "engine", "worker"]

SHM = "hpcrl_shm"
NCCL = "hpcrl_nccl"
IPC = "hpcrl_ipc"
#: the engines' ends that can take pieces, and who gets bytes once together
TAKES_PIECES: dict[str, Sharing] = {SHM: "host", "hpcrl_gloo": "engine", NCCL: "worker", IPC: "host"}


def destination_host(sharing: Sharing, engine: int, worker: int, where: str) -> str:
    """Which workers are one destination of bytes: those with the same answer.

    Args:
        worker: its place in the engine.
        where: its host.
    """
    apart = {"host": "", "engine": f"engine {engine} on ", "worker": f"worker {worker} of engine {engine} on "}
    return f"{apart[sharing]}{where}"


@dataclass(frozen=True)
class Route:
    """The way that weights take to the engines.

    Attributes:
        transfer: the value of --weight-transfer.
        backend: vLLM's name of the engines' end.
        gathered: why whole tensors go through rank 0, None where every rank sends its pieces.
    """

    transfer: str
    backend: str
    gathered: str | None


def route(options: Options, plan: Plan, cpu: bool) -> Route:
    """The way of this run's updates.

    Args:
        cpu: the engines run vLLM's CPU build.

    Raises:
        UsageError: as of `backend`.
    """
    way = _way(options, plan, cpu)
    name = way.__name__.rpartition(".")[2]
    if options.weight_update == "gathered":
        return Route(name, way.BACKEND, "--weight-update is gathered")
    return Route(name, way.BACKEND, whole_tensors(way.BACKEND, options.weight_update == "delta"))


def backend(options: Options, plan: Plan, cpu: bool) -> str:
    """vLLM's name of the weight-transfer backend.

    Raises:
        UsageError: when --weight-transfer asks for one that cannot work between these hosts or on this build.
    """
    return _way(options, plan, cpu).BACKEND


def whole_tensors(backend: str, delta: bool) -> str | None:
    """Why an update cannot be sent in pieces, as the end of a sentence; None if it can.

    Args:
        backend: vLLM's name of the engines' end.
        delta: it is to bring what has changed.
    """
    if backend not in TAKES_PIECES:
        return f"the engines receive with {backend}, which takes whole tensors"
    if backend in (NCCL, IPC) and delta:
        return "changes are found and kept in host memory, and over NCCL and CUDA IPC bytes come from the GPU's"
    return None


def _way(options: Options, plan: Plan, cpu: bool) -> TransportModule:
    one_host = (
        len({host for place in (*plan.trainers, *plan.engines) for host in place.hosts}) == 1 and not plan.external
    )
    from_host = options.weight_update in ("gathered", "delta")
    site = TransportConditions(cpu, one_host, options.colocate and not plan.external, from_host)
    return find_transport(choose(options.weight_transfer, site))
