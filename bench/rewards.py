"""Grading: answers a second, beside math-verify called plainly.

    python bench/rewards.py [--rounds 3] [--workers N]

Two loads: whole numbers, as most answers to dapo-math-17k are, and the tests' table of answers of every kind.  Each
round, one after another: math-verify's own `parse` and `verify` in this process, as its documentation has it; our
comparison in this process; and `--rm-type math` through the grading processes, limits included.  What is graded is the
same text; every way is warmed up first.  Hostile pairs are left out of the timing, since math-verify spends its whole
time-out on them.  Prints a table (also to bench/results/rewards.md) and, as its last line, one JSON object of the
ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from hpcrl.config.options import Options  # noqa: E402
from hpcrl.rollout.answers.labels import boxed, is_right  # noqa: E402
from hpcrl.rollout.grading.service import Grading  # noqa: E402
from hpcrl.sample import Sample  # noqa: E402
from tests.support.answers import TABLE, pairs  # noqa: E402

Pair = tuple[str, str]  # response, label


def loads() -> dict[str, list[Pair]]:
    """The two loads, as responses with a box."""
    hostile = TABLE[TABLE.index("# hostile") : TABLE.index("# written later")]
    table = [(a, label) for a, label, _ in pairs() if a.strip() and f"{a}  " not in hostile]
    numbers = [(str(n), str(n if n % 2 else n + 1)) for n in range(1000)]
    return {
        name: [(f"So it is \\boxed{{{a}}}.", label) for a, label in rows]
        for name, rows in (("whole numbers", numbers), ("table", table))
    }


def plain_math_verify(rows: list[Pair]) -> list[bool]:
    from math_verify import parse, verify

    return [bool(verify(parse(f"${label}$"), parse(response))) for response, label in rows]


def in_process(rows: list[Pair]) -> list[bool]:
    return [is_right(boxed(response), label) for response, label in rows]


def sample(response: str, label: str) -> Sample:
    nothing = np.zeros(1, np.int32)
    return Sample(0, 0, nothing, 1, nothing, nothing, nothing, response=response, label=label)


async def graded(grading: Grading, rows: list[Pair]) -> list[bool]:
    samples = [sample(*row) for row in rows]
    tally = grading.tally("bench", len(rows), 1)
    await asyncio.gather(*(grading.grade(s, "bench", tally) for s in samples))
    return [s.reward == 1 for s in samples]


def timed(work: Callable[[], list[bool]], size: int) -> float:
    """Answers a second."""
    begun = time.perf_counter()
    work()
    return size / (time.perf_counter() - begun)


def truths() -> dict[str, float]:
    """The share of the whole table, hostile answers included, that each judges as its hand-written truth has it."""
    rows = [(f"\\boxed{{{a}}}", label, truth) for a, label, truth in pairs()]
    both = {"ours": in_process, "math-verify": plain_math_verify}
    return {
        name: statistics.mean(
            found == truth for found, (*_, truth) in zip(judge([(r, label) for r, label, _ in rows]), rows, strict=True)
        )
        for name, judge in both.items()
    }


def measure(rounds: int, workers: int) -> dict[str, dict[str, list[float]]]:
    """Answers a second of each way, by load and round."""
    found: dict[str, dict[str, list[float]]] = {}

    async def go() -> None:
        grading = Grading(Options(rm_type="math", reward_num_workers=workers, reward_max_failed=1.0))
        await grading.start()
        try:
            for load, rows in loads().items():
                rates = found.setdefault(load, {"math-verify": [], "in process": [], "graded": []})
                plain_math_verify(rows), in_process(rows), await graded(grading, rows)
                for _ in range(rounds):
                    rates["math-verify"].append(timed(lambda rows=rows: plain_math_verify(rows), len(rows)))
                    rates["in process"].append(timed(lambda rows=rows: in_process(rows), len(rows)))
                    begun = time.perf_counter()
                    await graded(grading, rows)
                    rates["graded"].append(len(rows) / (time.perf_counter() - begun))
        finally:
            await grading.close()

    asyncio.run(go())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)) - 1)))
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    report(measure(args.rounds, args.workers), truths(), args.rounds, args.workers)


def report(found: dict[str, dict[str, list[float]]], right: dict[str, float], rounds: int, workers: int) -> None:
    """The table, and one JSON object as the last line."""
    lines, ratios = [], {}
    for load, rates in found.items():
        base = rates["math-verify"]
        for way, shown in (
            ("math-verify", "math-verify, called plainly"),
            ("in process", "our comparison, in this process"),
            ("graded", f"`--rm-type math`, {workers} grading process(es)"),
        ):
            ratio = statistics.median(a / b for a, b in zip(rates[way], base, strict=True))
            lines.append(f"| {load} | {shown} | {statistics.median(rates[way]):.0f} | {ratio:.2f} |")
            if way != "math-verify":
                ratios[f"{load.replace(' ', '_')}_{way.replace(' ', '_')}_over_math_verify"] = round(ratio, 2)
    head = "| load | way | answers/s, median | over math-verify, median of the rounds' ratios |\n|---|---|---|---|\n"
    truth = (
        f"Judged as the table of {sum(1 for _ in pairs())} hand-written truths has it: ours {right['ours']:.1%}, "
        f"math-verify {right['math-verify']:.1%}.\n"
    )
    text = f"Grading, {os.cpu_count()} cores, {rounds} rounds.\n\n{head}" + "\n".join(lines) + f"\n\n{truth}"
    print(text)
    (REPO / "bench" / "results" / "rewards.md").write_text(text)
    print(json.dumps(ratios | {f"right_{name}": round(value, 4) for name, value in right.items()}))


if __name__ == "__main__":
    main()
