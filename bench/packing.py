"""The schedule of micro-batches beside slime's published one, in one run.

    python bench/packing.py [--seeds 20] [--quick]

Work: long-tailed samples (lognormal, median 665 tokens, clipped to 256..4096) on 8 data-parallel ranks, 9216 tokens a
micro-batch at most.  Beside ours stands the textbook pair that slime publishes: first-fit packing in order of arrival,
micro-batches raised to a multiple of the ranks by halving the largest, then Karmarkar and Karp's differencing in its
form of equal counts.  Makespan is what the slowest rank takes, over the ideal of the tokens spread evenly: once where
ranks wait for one another at the end of the step, and once (synchronous) where they wait at each micro-batch, as expert
parallelism does.  Writes bench/results/packing.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

import numpy as np  # noqa: E402

from hpcrl.microbatches import make_schedule  # noqa: E402

RANKS, LIMIT = 8, 9216
SIZES = (256, 1024, 4096, 16384, 65536)
SLOWER_FROM = 65536  #: first-fit as published looks through all open micro-batches for every sample
Loads = list[list[int]]  #: [rank][micro-batch] -> tokens


def samples(n: int, seed: int) -> list[int]:
    """Lengths in tokens."""
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 0.7, n), 256, 4096).astype(int).tolist()


# ---- ours


def ours(lengths: list[int]) -> list[list[list[int]]]:
    """[rank][micro-batch] -> samples."""
    found = make_schedule(lengths, dp=RANKS, max_tokens_per_gpu=LIMIT)
    return [[list(micro) for micro in rank[0]] for rank in found.steps]


# ---- the published one


def first_fit(lengths: list[int], limit: int) -> list[list[int]]:
    """Each sample, in order of arrival, into the first micro-batch that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        for number, free in enumerate(room):
            if free >= length:
                bins[number].append(index)
                room[number] -= length
                break
        else:
            bins.append([index])
            room.append(limit - length)
    return bins


def differencing(sizes: list[int], parts: int) -> list[list[int]]:
    """Karmarkar and Karp (1982) for `parts` parts of equal counts: of two partial partitions of the largest difference
    the heaviest part of one joins the lightest of the other, until one partition is left."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for at in range(0, len(order), parts):
        state = sorted(((sizes[i], [i]) for i in order[at : at + parts]), reverse=True)
        heap.append((state[-1][0] - state[0][0], at, state))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, at, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], at, joined))
    return [members for _, members in heap[0][2]]


def published(lengths: list[int]) -> list[list[list[int]]]:
    """[rank][micro-batch] -> samples."""
    bins = first_fit(lengths, LIMIT)
    while len(bins) % RANKS:
        bins.sort(key=lambda micro: sum(lengths[i] for i in micro))
        largest = bins.pop()
        bins += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    ranks = differencing([sum(lengths[i] for i in micro) for micro in bins], RANKS)
    return [[bins[number] for number in rank] for rank in ranks]


# ---- measuring


@dataclass
class Row:
    """What one schedule gave for one number of samples, a number a seed."""

    ms: list[float] = field(default_factory=list)
    makespan: list[float] = field(default_factory=list)
    synchronous: list[float] = field(default_factory=list)
    bins: list[float] = field(default_factory=list)


def measure(schedule: Callable[[list[int]], list[list[list[int]]]], lengths: list[int], row: Row) -> None:
    begun = time.process_time()
    ranks = schedule(lengths)
    row.ms.append(1e3 * (time.process_time() - begun))
    assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(len(lengths))), "a sample is lost"
    loads = [[sum(lengths[i] for i in micro) for micro in rank] for rank in ranks]
    assert max(map(max, loads)) <= LIMIT and len({len(rank) for rank in loads}) == 1
    ideal = sum(lengths) / RANKS
    row.makespan.append(max(map(sum, loads)) / ideal)
    row.synchronous.append(sum(map(max, zip(*loads, strict=True))) / ideal)
    row.bins.append(len(loads[0]) / math.ceil(ideal / LIMIT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--quick", action="store_true", help="3 seeds, up to 4096 samples; the results file is left alone"
    )
    args = parser.parse_args()
    sizes = SIZES[:3] if args.quick else SIZES
    table: dict[tuple[str, int], Row] = {}
    for n in sizes:
        seeds = 3 if args.quick else max(3, args.seeds * 1024 // max(n, 1024))
        for seed in range(seeds):
            lengths = samples(n, seed)
            for name, schedule in (("ours", ours), ("published", published))[:: 1 if seed % 2 else -1]:
                if name == "ours" or n < SLOWER_FROM:
                    measure(schedule, lengths, table.setdefault((name, n), Row()))
    text, ratios = report(table, sizes)
    print(text)
    if not args.quick:
        (REPO / "bench" / "results" / "packing.md").write_text(text)
    print(json.dumps(ratios))


def report(table: dict[tuple[str, int], Row], sizes: tuple[int, ...]) -> tuple[str, dict[str, float]]:
    """The table as Markdown, and the ratios."""
    lines = [
        f"Micro-batches for {RANKS} ranks, {LIMIT} tokens at most, of long-tailed samples.",
        "",
        "Makespans are means over the seeds, over the ideal; times are medians, of the CPU.",
        "",
        "| samples | schedule | makespan | synchronous makespan | worst seed | micro-batches over the least | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    labels = {"ours": "**hpcrl**", "published": "first-fit, then Karmarkar-Karp (slime)"}
    for n in sizes:
        for name, label in labels.items():
            if row := table.get((name, n)):
                means = (statistics.mean(values) for values in (row.makespan, row.synchronous))
                shown = [
                    *(f"{mean:.4f}" for mean in means),
                    f"{max(row.synchronous):.4f}",
                    f"{statistics.mean(row.bins):.2f}",
                ]
                lines.append(f"| {n} | {label} | {' | '.join(shown)} | {statistics.median(row.ms):.2f} |")
    least, most = table["ours", 1024], table["ours", sizes[-1]]
    exponent = math.log(statistics.median(most.ms) / statistics.median(least.ms)) / math.log(sizes[-1] / 1024)
    lines += [
        "",
        f"From 1024 to {sizes[-1]} samples hpcrl's time grows with the power {exponent:.2f} of their number.",
        "",
    ]
    mine, peer = table["ours", 256], table["published", 256]
    ratios = {
        "makespan_256": max(mine.synchronous),
        "makespan_256_published": statistics.mean(peer.synchronous),
        "ms_256": statistics.median(mine.ms),
        "time_256_over_published": statistics.median(a / b for a, b in zip(mine.ms, peer.ms, strict=True)),
        "exponent": exponent,
    }
    return "\n".join(lines), {name: round(value, 4) for name, value in ratios.items()}


if __name__ == "__main__":
    main()
