"""A weight update gathered on rank 0 beside one in pieces, and beside a plain copy, in one run on one host.

    python bench/weights.py [--megabytes 256] [--rounds 5] [--quick]

Four trainer ranks (TP 2, two copies; rows are cut) and one engine of two workers (columns are cut), each a process with one
thread.  Gathered: rank 0 collects the parts of every tensor over gloo and fills shared buckets, as --weight-update gathered with
--weight-transfer shm does, and the workers copy their half out.  Pieces, in memory and over sockets: the outbox of every rank and
the inbox of every worker, as --weight-update resharded does with --weight-transfer shm and gloo.  vLLM's loaders are left out of
all three.  memcpy: one process copies as many bytes once.  Best of the rounds after one to warm up; writes
bench/results/weights.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import zmq  # noqa: E402

from hpcrl.engine.pieces.inbox import InboxReader  # noqa: E402
from hpcrl.models.slicing import Place  # noqa: E402
from hpcrl.queue.auth import ClientKeys, ServerKeys  # noqa: E402
from hpcrl.redistribution.layouts import Layouts, Part, Worker  # noqa: E402
from hpcrl.redistribution.plan import Redistribution, redistribute  # noqa: E402
from hpcrl.rendezvous.server import StoreServer  # noqa: E402
from hpcrl.weights import gloo_group  # noqa: E402
from hpcrl.weights.bucket import Bucket, fill, views  # noqa: E402
from hpcrl.weights.pieces.numbers import Numbers, OwnTensor  # noqa: E402
from hpcrl.weights.pieces.outbox import Addressee, Outbox  # noqa: E402
from hpcrl.weights.pieces.planning import inboxes, pieces_of, to_bytes  # noqa: E402
from hpcrl.weights.pieces.post import Post  # noqa: E402
from hpcrl.weights.shared_memory import Region, open_region  # noqa: E402

HERE, RANKS, WORKERS, ROWS, COLUMNS = "127.0.0.1", 4, 2, 1024, 4096
BYTES = 2  #: of bf16
BUCKET = 64 * 2**20
HALF = COLUMNS // WORKERS


@dataclass(frozen=True)
class Stage:
    """What all processes of one way share."""

    tensors: int
    rounds: int
    port: int
    keys: tuple[str, str, str]
    near: bool
    barrier: Any
    results: Any
    regions: Any


def value(number: int) -> float:
    return float(number % 97)


def own_part(number: int) -> torch.Tensor:
    return torch.full((ROWS // 2, COLUMNS), value(number), dtype=torch.bfloat16)


def plan_of(stage: Stage) -> Redistribution:
    layouts = Layouts()
    halves = [Part((i * ROWS // 2, (i + 1) * ROWS // 2), (0, COLUMNS), (i, i + 2)) for i in range(2)]
    held = layouts.pattern(halves)
    needed = layouts.pattern([Part((0, ROWS), (i * HALF, (i + 1) * HALF), (i,)) for i in range(WORKERS)])
    for number in range(stage.tensors):
        layouts.add(f"w{number}", (ROWS, COLUMNS), BYTES, held, needed)
    workers = [Worker(0, "here" if stage.near else "there")] * WORKERS
    return redistribute(layouts, workers, ["here"] * RANKS, BUCKET // 2)


def member(stage: Stage, me: int) -> Post:
    torch.set_num_threads(1)
    group = gloo_group.join(HERE, stage.port, ClientKeys(*stage.keys), me, RANKS + WORKERS, HERE, 120)
    return Post(group, me, RANKS, 120)


def timed(stage: Stage, work: Callable[[], None]) -> float:
    """Best seconds of all processes' work."""
    found = []
    for _ in range(stage.rounds + 1):
        stage.barrier.wait()
        begin = time.perf_counter()
        work()
        stage.barrier.wait()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def boxes_of(plan: Redistribution) -> list[Any]:
    names = plan.layouts.names
    return inboxes(plan, dict.fromkeys(names, "bfloat16"), dict.fromkeys(names, (ROWS, COLUMNS)))


def pieces_rank(stage: Stage, me: int) -> None:
    post, plan = member(stage, me), plan_of(stage)
    to = [Addressee(stage.near, box.porter, box.workers) for box in boxes_of(plan)]
    place = [Place(0, (me % 2 * ROWS // 2, (me % 2 + 1) * ROWS // 2), None, 0)]
    own = {f"w{n}": OwnTensor(own_part(n), place, 0, (ROWS, COLUMNS)) for n in range(stage.tensors)}
    numbers = Numbers(own, dict.fromkeys(own, "bfloat16"), None, {})
    outbox = Outbox(post, pieces_of(me, to_bytes(plan)), plan.layouts.names, to, plan.limit)
    seconds = timed(stage, lambda: outbox.send(numbers) and None)
    if me == 0:
        stage.results.put(seconds)


def pieces_worker(stage: Stage, me: int) -> None:
    post, plan = member(stage, me), plan_of(stage)
    held = {name: ([(0, ROWS)], ((me - RANKS) * HALF, HALF)) for name in plan.layouts.names}
    params = {name: torch.zeros(ROWS, HALF, dtype=torch.bfloat16) for name in held}
    [box] = boxes_of(plan)
    reader = InboxReader(post, box, held)

    def load(tensors: list[tuple[str, Any]], last: bool) -> None:
        for name, tensor in tensors:
            params[name].copy_(tensor.part)

    timed(stage, lambda: reader.receive(load))
    assert all((tensor == value(n)).all() for n, tensor in enumerate(params.values()))


def gathered_rank(stage: Stage, me: int) -> None:
    post = member(stage, me)
    parts = [own_part(n) for n in range(stage.tensors)]
    regions: list[Region] = []

    def whole() -> Any:
        for number, part in enumerate(parts):
            other = torch.empty_like(part)
            post.receive(other.view(-1).view(torch.uint8), 1, 5).wait()
            yield f"w{number}", torch.cat([part, other])

    def room(number: int, size: int) -> torch.Tensor:
        if number == len(regions):
            regions.append(Region(size))
        return regions[number].buffer

    def work() -> None:
        if me == 1:
            for part in parts:
                post.send(part.view(-1).view(torch.uint8), 0, 5).wait()
        if me == 0:
            buckets = [bucket.to_wire() for bucket, _, _ in fill(whole(), BUCKET, room)]
            for _ in range(WORKERS):
                stage.regions.put([buckets, [region.to_wire() for region in regions]])

    seconds = timed(stage, work)
    if me == 0:
        stage.results.put(seconds)


def gathered_worker(stage: Stage, me: int) -> None:
    member(stage, me)
    params = {f"w{n}": torch.zeros(ROWS, HALF, dtype=torch.bfloat16) for n in range(stage.tensors)}
    mapped: dict[str, torch.Tensor] = {}

    def work() -> None:
        buckets, regions = stage.regions.get()
        for bucket, wire in zip(buckets, regions, strict=True):
            key = json.dumps(wire)
            if key not in mapped:
                mapped[key] = open_region(wire)
            for name, tensor in views(mapped[key], Bucket.from_wire(bucket)):
                params[name].copy_(tensor.narrow(1, (me - RANKS) * HALF, HALF))

    timed(stage, work)
    assert all((tensor == value(n)).all() for n, tensor in enumerate(params.values()))


def run(rank: Callable[..., None], worker: Callable[..., None], tensors: int, rounds: int, near: bool = True) -> float:
    """Seconds of an update."""
    context = mp.get_context("fork")
    own, mine = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    server = StoreServer(HERE, ServerKeys(*own, (mine[0],)))
    count = RANKS + WORKERS
    stage = Stage(tensors, rounds, server.port, (*mine, own[0]), near, context.Barrier(count), context.Queue(), context.Queue())
    processes = [context.Process(target=rank if me < RANKS else worker, args=(stage, me), daemon=True) for me in range(count)]
    for process in processes:
        process.start()
    seconds = stage.results.get(timeout=600)
    for process in processes:
        process.join(60)
        if process.exitcode:
            raise SystemExit(f"a process ended with {process.exitcode}")
    server.close()
    return float(seconds)


def memcpy(size: int, rounds: int) -> float:
    source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    found = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    rounds, size = (2, 64) if asked.quick else (asked.rounds, asked.megabytes)
    tensors = max(4, size * 2**20 // (ROWS * COLUMNS * BYTES))
    total = tensors * ROWS * COLUMNS * BYTES
    seconds = {
        "memcpy": memcpy(total, rounds),
        "gathered, shared memory": run(gathered_rank, gathered_worker, tensors, rounds),
        "pieces, shared memory": run(pieces_rank, pieces_worker, tensors, rounds),
        "pieces, sockets": run(pieces_rank, pieces_worker, tensors, rounds, near=False),
    }
    lines = [f"# Weight updates of {total / 2**20:.0f} MiB, 4 ranks to 2 workers on one host", ""]
    lines += ["| | seconds | GB/s | of memcpy | of gathered |", "|---|---|---|---|---|"]
    for name, took in seconds.items():
        beside = seconds["memcpy"] / took
        lines.append(
            f"| {name} | {took:.3f} | {total / took / 1e9:.2f} | {beside:.2f} | {took / seconds['gathered, shared memory']:.2f} |"
        )
    print("\n".join(lines))
    if not asked.quick:
        (REPO / "bench" / "results" / "weights.md").write_text("\n".join(lines) + "\n")
    pieces = seconds["pieces, shared memory"]
    print(
        json.dumps(
            {
                "pieces_of_gathered": pieces / seconds["gathered, shared memory"],
                "pieces_rate_of_memcpy": seconds["memcpy"] / pieces,
            }
        )
    )


if __name__ == "__main__":
    main()
