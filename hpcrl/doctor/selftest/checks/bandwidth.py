"""How fast the ranks add up, as a share of what the links between them carry."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome, Skip
from hpcrl.run.process import run_command

if TYPE_CHECKING:
    import torch

#: bytes that are added up: enough for the bandwidth, not the latency, to count
DEFAULT_BYTES = {"nccl": 1 << 30, "gloo": 1 << 24}
SLOW = 0.25  #: of the link: below this the fast network or NVLink is not in use
ROUNDS = 5


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second that a link carries, whatever the number of ranks: size / seconds * 2(n-1)/n (NVIDIA nccl-tests,
    doc/PERFORMANCE.md: n-1 of n parts are sent twice, once to be added up and once to be given out)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def measure(size: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """All-reduce `size` bytes of float32 over the default group; one round to warm up, then the median of `rounds`.

    Every rank holds rank+1 everywhere, so the sum is n(n+1)/2.

    Raises:
        RuntimeError: if it is anything else, anywhere.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    tensor = torch.empty(max(size // 4, 1), dtype=torch.float32, device=device)
    times = []
    for _ in range(rounds + 1):
        tensor.fill_(rank + 1.0)
        dist.barrier()
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        _wait(device)
        times.append(time.perf_counter() - began)
    if not bool((tensor == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"rank {rank}: the all-reduce gave a wrong sum")
    # the slowest rank counts
    seconds = torch.tensor(sorted(times[1:])[rounds // 2], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    used = tensor.numel() * 4
    return {
        "ranks": ranks,
        "backend": dist.get_backend(),
        "bytes": used,
        "seconds": seconds.item(),
        "bus_bandwidth": bus_bandwidth(used, seconds.item(), ranks),
    }


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nvlink(text: str) -> float | None:
    """Bytes a second one way over all links of the first GPU in `nvidia-smi nvlink --status`; None where it shows
    none."""
    total, gpus = 0.0, 0
    for line in text.splitlines():
        gpus += line.startswith("GPU ")
        words = line.split()
        if gpus == 1 and words[:1] == ["Link"] and words[-1:] == ["GB/s"]:
            total += float(words[-2]) * 1e9
    return total or None


def work(place: CheckContext) -> Outcome:
    """An all-reduce over all ranks, timed."""
    if place.world == 1:
        raise Skip("one rank: there is nothing to send")
    kind = "nccl" if place.device.type == "cuda" else "gloo"
    found = measure(DEFAULT_BYTES[kind], ROUNDS, place.device)
    speed = found["bus_bandwidth"]
    link, name = place.link, "the network"
    if place.hosts == 1:
        answer = run_command(["nvidia-smi", "nvlink", "--status"], 20.0)
        link = nvlink(answer.out) if answer.code == 0 else None
        name = "NVLink"
    numbers = {
        "bus_bytes_per_second": speed,
        "bytes": found["bytes"],
        "backend": found["backend"],
        "hosts": place.hosts,
    }
    shown = f"{speed / 1e9:.3g} GB/s bus bandwidth over {place.world} ranks of {place.hosts} hosts ({found['backend']})"
    if link is None:
        return Outcome("passed", f"{shown}; the link's own rate is not known", numbers)
    numbers |= {"link_bytes_per_second": link, "share_of_link": speed / link}
    shown += f", {speed / link:.0%} of {name}'s {link / 1e9:.3g} GB/s"
    if speed < SLOW * link and kind == "nccl":
        return Outcome(
            "failed", f"{shown}: less than {SLOW:.0%}; see NCCL_DEBUG=INFO and the site's interface and env", numbers
        )
    return Outcome("passed", shown, numbers)


CHECK = Check("an all-reduce uses the links between the ranks", 30, "ranks", work, ("torch",))
