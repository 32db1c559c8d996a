"""Trainer and engine give the same log-probs to the tokens that the engine sampled, before and after an update."""

from __future__ import annotations

from pathlib import Path

from hpcrl.algorithms.loss import DIFFERENCE
from hpcrl.doctor.selftest.registry import Check, Outcome
from hpcrl.doctor.selftest.whole_run import ENGINES, gpu_count, sampling_run

BOUND = {"fp32": 1e-4, "bf16": 0.05}  #: nats, mean absolute


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    rows = sampling_run(directory, gpus)
    kind = "bf16" if gpus else "fp32"
    means = [row[f"train/{DIFFERENCE}"] for row in rows]
    if not means:
        return Outcome("failed", "the run has logged no step")
    worst = max(means)
    numbers = {
        "mean_absolute_difference": worst,
        "largest_difference": max(row[f"train/{DIFFERENCE}_max"] for row in rows),
    }
    largest = numbers["largest_difference"]
    shown = f"{kind}: {worst:.1e} apart in the mean of a step, {largest:.1e} at most; {BOUND[kind]:g} is allowed"
    return Outcome("passed" if worst <= BOUND[kind] else "failed", shown, numbers)


CHECK = Check("trainer and engine agree on log-probs", 90, "launcher", work, ENGINES)
