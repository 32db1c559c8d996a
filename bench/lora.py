"""A LoRA adapter beside all weights, and beside TRL with PEFT: seconds a step, same model, data and machine.

    python bench/lora.py [--rounds 3] [--steps 12] [--work quickstart,short] [--rank 8] [--trl-python PYTHON]

Kinds of work as in `end_to_end.py`.  Ours is `hpcrl run --loop sync`: with --lora-rank, where engines multiply with the
adapter or hold the weights with it added in, and without; TRL's GRPOTrainer has PEFT's LoraConfig of the same rank next to
all linear layers, and generates with transformers.  Each side is a run of --steps steps; what counts is the median after
the first three: of a step, of its training, of its weight update and the bytes that this sent.  A round takes every
side once.  PEFT and TRL are of requirements/bench.txt.  Writes bench/results/lora.md; the last line printed is one JSON
object of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from bench.end_to_end import CORES, EACH, WARM_UP, Work, ours, prepare, run_all, step_time, trl  # noqa: E402

ALPHA = 16
RATE = 3e-3
SIDES = ("TRL with PEFT", "adapter", "adapter, merged", "all weights")
#: metrics of ours -> what they are called in the table
PARTS = {
    "perf/train_time": "of it training",
    "perf/update_weights_time": "of it the update",
    "perf/update_weights_bytes": "bytes of an update",
}
Measures = dict[str, float]


def measured(side: str, work: Work, steps: int, rank: int, python: str, place: Path) -> Measures:
    """The medians of one run."""
    if side == SIDES[0]:
        return {"step": step_time(trl(python, work, steps, rank=rank, alpha=ALPHA, lr=RATE))}
    lora: Mapping[str, Any] = {}
    if side != SIDES[-1]:
        served = "merged" if side == SIDES[2] else "adapter"
        lora = {"lora_rank": rank, "lora_alpha": ALPHA, "lora_type": "canonical_lora", "lora_serve": served, "lr": RATE}
    rows = ours(place, work, "sync", steps, **lora)
    logged = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    after = [row for row in logged if "train/loss" in row][WARM_UP:]
    return {"step": step_time(rows)} | {name: statistics.median(row[name] for row in after) for name in PARTS}


def measure(args: argparse.Namespace, root: Path, name: str) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table and ratios of one kind of work."""
    work = prepare(root, name)
    found: dict[str, list[Measures]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in SIDES:
            place = root / f"{side.replace(' ', '-').replace(',', '')}-{number}"
            place.mkdir()
            found[side].append(measured(side, work, args.steps, args.rank, args.trl_python, place))
            print(f"{name} round {number} {side}: {found[side][-1]}", file=sys.stderr, flush=True)
    rows, ratios = [], {}
    for side in SIDES:
        each = [one["step"] for one in found[side]]
        pairs = list(zip(found[SIDES[1]], found[side], strict=True))
        rate = statistics.median(other["step"] / adapter["step"] for adapter, other in pairs)
        key = f"{name}_{side.lower().replace(' ', '_').replace(',', '')}_over_adapter"
        if side != SIDES[1]:
            ratios[key] = round(rate, 3)
        parts = [[one[part] for one in found[side] if part in one] for part in PARTS]
        shown = [f"{statistics.median(values):.4g}" if values else "" for values in parts]
        median = f"{statistics.median(each):.3f}"
        rows.append((name, side, median, *shown, f"{work.groups * EACH / statistics.median(each):.0f}", f"{rate:.2f}"))
    return rows, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", default="quickstart,short")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL and PEFT")
    args = parser.parse_args()
    run_all(args, measure, write)


def write(args: argparse.Namespace, rows: list[tuple[str, ...]]) -> None:
    """The table so far, printed and in bench/results/."""
    head = ("work", "side", "seconds a step", *PARTS.values(), "samples a second", "step, times the adapter's")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    load = os.getloadavg()[0]
    told = f"{CORES} cores, {args.rounds} rounds of {args.steps} steps, rank {args.rank}; load at the end {load:.1f}"
    text = f"{told}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    (REPO / "bench" / "results" / "lora.md").write_text(text)


if __name__ == "__main__":
    main()
