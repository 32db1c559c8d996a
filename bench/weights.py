"""Weight updates in pieces from all ranks, next to a plain copy and the limit of the links, in one run.

    python bench/weights.py [--megabytes 256] [--rounds 5] [--rate 200] [--quick] [--no-hosts]

One host: four trainer ranks (TP 2, two copies) and one engine of two workers, a process each
(bench/weights_roles/members.py), over shared memory and over sockets; memcpy: one process copies as many bytes once;
memcpy twice: two processes, half of them each, into other memory and from there into a third, which is the most that a
way can reach that copies each byte twice.  Six hosts: four of a rank each and two of an engine each, as network
namespaces on a bridge with links of --rate Mbit/s in each direction (root and tc; weights_roles/hosts.py). There the
least possible is the time in which the busiest link of the plan carries its bytes.  Best of the rounds after one to
warm up.

Writes bench/results/weights.md with the machine's load beside; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)

import numpy as np  # noqa: E402

from bench.weights_roles.hosts import BRIDGE, Host, switch  # noqa: E402
from bench.weights_roles.members import BYTES, COLUMNS, LIMIT, RANKS, ROWS, Stage, member, plan_of  # noqa: E402
from hpcrl.transport.torch_store import open_store  # noqa: E402

HERE = "127.0.0.1"
BUCKET = 64 * 2**20
LOAD = (
    "Load: how many processes wanted one of the {} cores when a row ended. memcpy is one process, the best of tries "
    "before each row; the update has six processes. Over shared memory each byte is copied twice: by the rank, and into "
    "the parameter."
)


@dataclass(frozen=True)
class Result:
    """seconds: best of an update; busy: processor's seconds of all processes together; load: of the machine when it
    ended."""

    seconds: float
    busy: float
    load: float


def run(near: bool, tensors: int, rounds: int, hosts: tuple[Host, ...] = (), bucket: int = BUCKET) -> Result:
    """Updates over shared memory (near) or sockets.  SystemExit if a process fails."""
    context = mp.get_context("fork")
    store = BRIDGE if hosts else HERE
    server = open_store(store)
    engines = 2 if hosts else 1
    count = RANKS + 2 * engines
    shared = (context.Barrier(count), context.Queue())
    stage = Stage(tensors, rounds, engines, store, server.port, near, bucket, hosts, *shared)
    processes = [context.Process(target=member, args=(stage, me), daemon=True) for me in range(count)]
    for process in processes:
        process.start()
    told = [stage.results.get(timeout=10 * LIMIT) for _ in range(count)]
    for process in processes:
        process.join(60)
        if process.exitcode:
            raise SystemExit(f"a process ended with {process.exitcode}")
    return Result(
        min(next(found for me, found, _ in told if me == 0)), sum(busy for *_, busy in told), os.getloadavg()[0]
    )


def memcpy(size: int, rounds: int) -> Result:
    source = np.ones(size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    found, used = [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF)
        np.copyto(target, source)
        found.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Result(min(found[1:]), min(used[1:]), os.getloadavg()[0])


def memcpy_twice(size: int, rounds: int) -> Result:
    """Two processes at once, each half of the bytes, and each byte twice."""
    context = mp.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_twice, args=(size // 2, rounds, barrier, results), daemon=True) for _ in range(2)
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=LIMIT) for _ in processes]
    for process in processes:
        process.join(60)
    return Result(max(seconds for seconds, _ in told), sum(busy for _, busy in told), os.getloadavg()[0])


def _twice(size: int, rounds: int, barrier: Any, results: Any) -> None:
    source = np.ones(size, dtype=np.uint8)
    between = np.zeros(size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    found = []
    for _ in range(rounds + 1):
        barrier.wait(LIMIT)
        begin, used = time.perf_counter(), time.process_time()
        np.copyto(between, source)
        np.copyto(target, between)
        busy = time.process_time() - used
        barrier.wait(LIMIT)
        found.append((time.perf_counter() - begin, busy))
    results.put(min(found[1:]))


def over_hosts(tensors: int, rounds: int, rate: int, answers: Any) -> None:
    """In a process of its own: seconds of an update, and the least that the plan's busiest link needs."""
    switch()
    hosts = tuple(Host(number, rate) for number in range(RANKS + 2))
    found: dict[str, Any] = {}
    found["pieces"] = run(False, tensors, rounds, hosts, BUCKET // 4)
    plan = plan_of(Stage(tensors, 1, 2, "", 0, False, BUCKET // 4, hosts, None, None))
    busiest = max(plan.crossing().max(), plan.arriving().max())
    found["least"] = Result(float(busiest) * 8 / (rate * 1e6), 0.0, 0.0)
    answers.put(found)


def in_own_process(*arguments: Any) -> dict[str, Result]:
    context = mp.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=over_hosts, args=(*arguments, answers))
    process.start()
    while process.is_alive() and answers.empty():
        time.sleep(0.1)
    if answers.empty():
        raise SystemExit("the part over hosts failed: it needs root, ip and tc")
    found = answers.get()
    process.join()
    return dict(found)


def table(rows: dict[str, Result], total: int, limit: str) -> list[str]:
    """limit: the row that the others are compared with."""
    lines = [f"| | seconds | GB/s | {limit} / this | processor's seconds | load |", "|---|" + 5 * "---|"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.seconds:.3f} | {total / row.seconds / 1e9:.3f} "
            f"| {rows[limit].seconds / row.seconds:.2f} | {row.busy:.2f} | {row.load:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s of a host's link")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-hosts", action="store_true")
    asked = parser.parse_args()
    rounds, size = (2, 64) if asked.quick else (asked.rounds, asked.megabytes)
    tensors = max(4, size * 2**20 // (ROWS * COLUMNS * BYTES))
    total = tensors * ROWS * COLUMNS * BYTES
    rows = {"memcpy": memcpy(total, rounds), "memcpy twice, two processes": memcpy_twice(total, rounds)}
    for near in (True, False):
        rows["memcpy"] = min(rows["memcpy"], memcpy(total, rounds), key=lambda row: row.seconds)
        rows[f"pieces, {'shared memory' if near else 'sockets'}"] = run(near, tensors, rounds)
    lines = [
        "# Weight updates",
        "",
        f"{total / 2**20:.0f} MiB, 4 ranks to 2 workers on one host of {os.cpu_count()} cores.",
        "",
    ]
    lines += [*table(rows, total, "memcpy"), "", LOAD.format(os.cpu_count())]
    pieces = rows["pieces, shared memory"]
    last = {
        "pieces_rate_of_memcpy": rows["memcpy"].seconds / pieces.seconds,
        "pieces_rate_of_memcpy_twice": rows["memcpy twice, two processes"].seconds / pieces.seconds,
    }
    if not asked.no_hosts:
        few = max(4, tensors // 4)
        part = few * ROWS * COLUMNS * BYTES
        over = in_own_process(few, max(2, rounds // 2), asked.rate)
        lines += [
            "",
            f"{part / 2**20:.0f} MiB, 4 hosts of a rank to 2 hosts of an engine, links of {asked.rate} Mbit/s.",
            "",
        ]
        lines += table(over, part, "least")
        last["hosts_pieces_of_least"] = over["pieces"].seconds / over["least"].seconds
    print("\n".join(lines))
    if not asked.quick:
        (REPO / "bench" / "results" / "weights.md").write_text("\n".join(lines) + "\n")
    print(json.dumps(last))


if __name__ == "__main__":
    main()
