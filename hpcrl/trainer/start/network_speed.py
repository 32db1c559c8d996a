"""Bandwidth of the trainer group: one timed all-reduce, before a run spends an hour on a slow network.

    RANK=0 WORLD_SIZE=16 MASTER_ADDR=10.0.0.1 MASTER_PORT=29400 [LOCAL_RANK=0] \\
        python -m hpcrl.trainer.start.network_speed

Rank 0 prints one JSON line.  NCCL over GPUs, gloo where there are none.

Invariants: the sum is checked, so that a fast network that is wrong is not a result; rank 0 listens on MASTER_ADDR
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.errors import DeadlineError
from hpcrl.run.process import die_with_parent
from hpcrl.run.rundir import write_atomic
from hpcrl.trainer.collectives import connect_when_needed
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.untrusted_files import read_regular

#: bytes that are added up: enough for the bandwidth, not the latency, to count
DEFAULT_BYTES = {"nccl": 1 << 30, "gloo": 1 << 24}


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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join(seconds: float, port_file: Path | None = None) -> torch.device:
    """Form the group that the environment names, within `seconds`; the device of this rank."""
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=seconds)
    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, port_file, seconds)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    bound = {} if device.type == "cpu" else {"device_id": device}
    connect_when_needed()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait, **bound)
    return device


def _store(address: str, port: int, rank: int, port_file: Path | None, seconds: float) -> dist.TCPStore:
    """Where the ranks meet.

    Raises:
        DeadlineError: if rank 0 does not tell its port in `port_file`.
    """
    wait = timedelta(seconds=seconds)
    opened = {}
    first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if first:
        # torch's own would listen on every interface; this descriptor is handed over, and closed by the store
        listener = socket.create_server((address, port), backlog=512)
        port = listener.getsockname()[1]
        if port_file:
            write_atomic(port_file, str(port).encode())
        opened = {"master_listen_fd": listener.detach()}
    elif not port and port_file:
        end = Deadline(seconds)
        while not port_file.exists():
            if end.over:
                raise DeadlineError(f"rank 0 did not write {port_file} within {seconds:.0f} s", "see its log")
            time.sleep(0.05)
        port = int(read_regular(port_file))
    return dist.TCPStore(address, port, is_master=first, wait_for_workers=False, timeout=wait, **opened)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time an all-reduce over the ranks that the environment names.")
    parser.add_argument("--bytes", type=int, help="default: 1 GiB over NCCL, 16 MiB over gloo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for the group to form, and for a round")
    parser.add_argument("--port-file", type=Path, help="with MASTER_PORT=0: where rank 0 tells the port that it got")
    args = parser.parse_args(argv)
    die_with_parent()
    device = join(args.deadline, args.port_file)
    try:
        found = measure(args.bytes or DEFAULT_BYTES[dist.get_backend()], args.rounds, device)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()  # rank 0 holds the store: no rank leaves before all are done
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
