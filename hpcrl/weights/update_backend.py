"""How the weight updates of a run travel, from its options and hosts; `hpcrl plan` prints what a run then does.

    shm     memory that processes of one host share
    gloo    sockets
    nccl    NCCL between GPUs
    ipc     memory of the GPUs that trainer and engines share, between hosts NCCL
    disk    a directory of safetensors, which every engine reads
    vllm    whole tensors, by vLLM's own weight transfer: over NCCL from rank 0, on shared GPUs over CUDA IPC

Invariant: a run sends its updates in the way that `backend` predicts.
"""

from __future__ import annotations

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


def transfer_obstacle(transfer: str, cpu: bool, one_host: bool, shared: bool) -> str | None:
    """Why a way cannot work, as the end of the sentence "--weight-transfer NAME ..."; None if it can.

    Args:
        cpu: the engines run vLLM's CPU build.
        one_host: all of the run is on one.
        shared: trainer and engines share GPUs.
    """
    if transfer in ("nccl", "ipc", "vllm") and cpu:
        return "needs CUDA, but vLLM's CPU build is installed"
    if transfer == "nccl" and shared:
        return "takes a GPU once, and with --colocate trainer and engines share theirs"
    if transfer == "ipc" and not shared:
        return "is for engines on the trainer's GPUs: it needs --colocate"
    if transfer == "shm" and not one_host:
        return "needs trainer and engines on one host"
    return None


def destination_host(sharing: Sharing, engine: int, worker: int, where: str) -> str:
    """Which workers are one destination of bytes: those with the same answer.

    Args:
        worker: its place in the engine.
        where: its host.
    """
    apart = {"host": "", "engine": f"engine {engine} on ", "worker": f"worker {worker} of engine {engine} on "}
    return f"{apart[sharing]}{where}"


def backend(options: Options, plan: Plan, cpu: bool) -> str:
    """vLLM's name of the weight-transfer backend.

    Raises:
        UsageError: when --weight-transfer asks for one that cannot work between these hosts or on this build.
    """
    name = _way(options, plan, cpu)
    return VLLM_IPC if name == "vllm" and options.colocate and not plan.external else f"hpcrl_{name}"


def _way(options: Options, plan: Plan, cpu: bool) -> str:
    hosts = {host for place in (*plan.trainers, *plan.engines) for host in place.hosts}
    site = (cpu, False, False) if plan.external else (cpu, len(hosts) == 1, options.colocate)
    wish = options.weight_transfer
    if wish == "auto":
        on_gpus = "nccl" if plan.external else options.gpu_transfer
        wish = ("shm" if site[1] else "gloo") if cpu else on_gpus
    if why := transfer_obstacle(wish, *site):
        names = sorted(end.removeprefix("hpcrl_") for end in BACKENDS if end != VLLM_IPC)
        others = [name for name in names if not transfer_obstacle(name, *site)]
        raise UsageError(f"--weight-transfer {wish} {why}", f"use auto or {' or '.join(others)}")
    return wish
