"""How the weight updates of a run travel, from its options and hosts; `hpcrl plan` prints what a run then does.

    shm     memory that processes of one host share
    gloo    sockets
    nccl    NCCL between GPUs
    ipc     memory of the GPUs that trainer and engines share, between hosts NCCL
    disk    a directory of safetensors, which every engine reads
    vllm    whole tensors, by vLLM's own weight transfer: over NCCL from rank 0, on shared GPUs over CUDA IPC

Invariant: a run sends its updates in the way that `route` predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.plan import Plan

Sharing = Literal["host", "engine", "worker"]

SHM = "hpcrl_shm"
NCCL = "hpcrl_nccl"
IPC = "hpcrl_ipc"
DISK = "hpcrl_disk"
VLLM = "hpcrl_vllm"
VLLM_IPC = "hpcrl_vllm_ipc"  #: of --weight-transfer vllm on GPUs that trainer and engines share
#: the engines' ends that take pieces, and who gets bytes once together
TAKES_PIECES: dict[str, Sharing] = {SHM: "host", "hpcrl_gloo": "engine", NCCL: "worker", IPC: "host"}
#: vLLM's names of all of them: "hpcrl_" and the value of --weight-transfer
BACKENDS = (*TAKES_PIECES, DISK, VLLM, VLLM_IPC)


@dataclass(frozen=True)
class TransportConditions:
    """What decides whether a way can work.

    Attributes:
        cpu: the engines run vLLM's CPU build.
        one_host: all of the run is on one.
        on_gpus: what auto is on GPUs.
        colocate: trainer and engines share GPUs.
    """

    cpu: bool
    one_host: bool
    colocate: bool
    on_gpus: str = "nccl"


def transfer_obstacle(transfer: str, site: TransportConditions) -> str | None:
    """Why a way cannot work at this site, as the end of the sentence "--weight-transfer NAME ..."; None if it can."""
    if transfer in ("nccl", "ipc", "vllm") and site.cpu:
        return "needs CUDA, but vLLM's CPU build is installed"
    if transfer == "nccl" and site.colocate:
        return "takes a GPU once, and with --colocate trainer and engines share theirs"
    if transfer == "ipc" and not site.colocate:
        return "is for engines on the trainer's GPUs: it needs --colocate"
    if transfer == "shm" and not site.one_host:
        return "needs trainer and engines on one host"
    return None


def choose(wish: str, site: TransportConditions) -> str:
    """The name of the way to take.

    Raises:
        UsageError: when `wish` asks for one that cannot work at this site.
    """
    if wish == "auto":
        if site.cpu:
            wish = "shm" if site.one_host else "gloo"
        else:
            wish = site.on_gpus
    if why := transfer_obstacle(wish, site):
        others = [name for name in sorted(_names()) if not transfer_obstacle(name, site)]
        raise UsageError(f"--weight-transfer {wish} {why}", f"use auto or {' or '.join(others)}")
    return wish


def _names() -> list[str]:
    return [backend.removeprefix("hpcrl_") for backend in BACKENDS if backend != VLLM_IPC]


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
        whole: whole tensors go through rank 0; else every rank sends its pieces.
    """

    transfer: str
    backend: str
    whole: bool


def route(options: Options, plan: Plan, cpu: bool) -> Route:
    """The way of this run's updates.

    Args:
        cpu: the engines run vLLM's CPU build.

    Raises:
        UsageError: as of `backend`.
    """
    end = backend(options, plan, cpu)
    return Route("vllm" if end == VLLM_IPC else end.removeprefix("hpcrl_"), end, end not in TAKES_PIECES)


def backend(options: Options, plan: Plan, cpu: bool) -> str:
    """vLLM's name of the weight-transfer backend.

    Raises:
        UsageError: when --weight-transfer asks for one that cannot work between these hosts or on this build.
    """
    name = _way(options, plan, cpu)
    return VLLM_IPC if name == "vllm" and options.colocate and not plan.external else f"hpcrl_{name}"


def _way(options: Options, plan: Plan, cpu: bool) -> str:
    hosts = {host for place in (*plan.trainers, *plan.engines) for host in place.hosts}
    if plan.external:
        return choose(options.weight_transfer, TransportConditions(cpu, one_host=False, colocate=False))
    site = TransportConditions(cpu, len(hosts) == 1, options.colocate, options.gpu_transfer)
    return choose(options.weight_transfer, site)
