"""A real engine takes every tensor of an update: what it holds afterwards is what was sent, bit for bit."""

from __future__ import annotations

from pathlib import Path

from hpcrl.doctor.selftest.registry import Check, Outcome
from hpcrl.doctor.selftest.whole_run import ENGINES, gpu_count, sampling_run


def work(directory: Path) -> Outcome:
    rows = sampling_run(directory, gpu_count())
    if not rows:
        return Outcome("failed", "the run has logged no step")
    last = rows[-1]
    numbers = {
        "seconds": last["perf/update_weights_time"],
        "bytes": last["perf/update_weights_bytes"],
        "updates": len(rows) + 1,
    }
    shown = f"{len(rows) + 1} updates, every tensor compared; the last took {numbers['seconds']:.2f} s"
    return Outcome("passed", shown, numbers)


CHECK = Check("an engine holds the weights that were sent", 80, "launcher", work, ENGINES)
