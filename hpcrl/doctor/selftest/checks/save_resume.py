"""A run that was stopped and resumed continues with the same bits as one that was not stopped, over all GPUs of the
host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.doctor.selftest.registry import Check, Outcome
from hpcrl.doctor.selftest.whole_run import gpu_count, run, steps, write_recipe
from hpcrl.errors import Stopped
from hpcrl.run.rundir import RunDir

STEPS = 8
COMPARED = ("train/loss", "train/grad_norm")


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    recipe = write_recipe(
        directory,
        "training",
        gpus,
        loss_type="sft_loss",
        rollout_num_gpus=0,
        num_rollout=STEPS,
        rollout_batch_size=8 * max(gpus, 1),
        actor_num_gpus_per_node=max(gpus, 1),
        save_interval=2,
        rollout_shuffle=True,
    )
    whole, parted = directory / "whole", directory / "parted"
    with ThreadPoolExecutor(1 if gpus else 2) as pool:  # GPUs are for one run at a time
        both = [
            pool.submit(run, [str(recipe), "--run-dir", str(whole)], directory / "whole.log"),
            pool.submit(_in_parts, recipe, parted, directory),
        ]
    _, before = (each.result() for each in both)
    one, other = ([tuple(row[name] for name in COMPARED) for row in steps(root)] for root in (whole, parted))
    numbers = {"steps": len(one), "stopped_after": before}
    if len(one) != STEPS or len(other) != STEPS:
        return Outcome("failed", f"{len(one)} and {len(other)} steps logged, {STEPS} expected", numbers)
    wrong = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
    if wrong is not None:
        return Outcome(
            "failed", f"stopped after {before} steps; step {wrong} has {other[wrong]} instead of {one[wrong]}", numbers
        )
    return Outcome(
        "passed",
        f"stopped after {before} of {STEPS} steps and resumed: losses and gradient norms the same bits",
        numbers,
    )


def _in_parts(recipe: Path, root: Path, logs: Path) -> int:
    """Run it to a stop, then resume it; how many steps were made before the stop."""
    run([str(recipe), "--run-dir", str(root)], logs / "parted.log", Stopped.exit_code, lambda: _stop(root))
    before = len(steps(root))
    run(["--resume", str(root)], logs / "resumed.log")
    return before


def _stop(root: Path) -> bool:
    """Ask the run to save and stop once it has made a step."""
    if not steps(root):
        return False
    RunDir(root).request_stop()
    return True


CHECK = Check(
    "a run that was stopped and resumed is the run that was not",
    100,
    "launcher",
    work,
    ("torch", "megatron.core", "transformers"),
)
