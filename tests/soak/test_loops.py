"""On the quick start's task the fully asynchronous loop reaches the held-out accuracy of the synchronous one in less
wall time.

From one supervised warm-up a seed, the loops one after another on the same machine; time counts from the evaluation
before the first step to the first evaluation that is as good as the synchronous loop's last, with which the second run
ends.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import REPO, Run, all_gone, metrics, rows

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SHARED, WARM_UP, GRPO = (REPO / "examples" / "quickstart.toml").read_text().split("[[stage]]\n")
SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,2,3").split(",")]
#: flags of each loop; the second has twice as many rollouts to get there
LOOPS: dict[str, list[str]] = {
    "sync": ["--num-rollout", "60"],
    "fully-async": ["--loop", "fully-async", "--max-staleness", "2", "--use-tis", "--num-rollout", "120"],
}


def run_stage(directory: Path, stage: str, seed: int, *flags: str, target: float | None = None) -> Path:
    """Run one stage of the recipe as a run of its own, until its held-out accuracy is `target`: the stage's
    directory."""
    directory.mkdir(exist_ok=True)
    recipe = directory / "recipe.toml"
    recipe.write_text(SHARED.replace("{recipe}/", f"{REPO}/examples/") + "[[stage]]\n" + stage)
    root = directory / "run"
    found = root / re.search(r'name = "(\w+)"', stage).group(1)
    run = Run(recipe, "--run-dir", root, "--seed", str(seed), *flags, root=root)
    deadline, asked = time.monotonic() + 1200, False
    while run.process.poll() is None and not asked and time.monotonic() < deadline:
        if asked := target is not None and any(accuracy >= target for _, accuracy in course(found)):
            run.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    status, out = run.end(120)
    assert status == (143 if asked else 0), out + run.logs()
    assert all_gone(root, [])
    return found


def course(root: Path) -> list[tuple[float, float]]:
    """(seconds since the first evaluation, held-out accuracy) of every evaluation."""
    found: list[dict[str, Any]] = [row for row in rows(root) if "eval/heldout/accuracy" in row]
    return [(row["time"] - found[0]["time"], row["eval/heldout/accuracy"]) for row in found]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loop_that_never_waits_is_there_sooner(seed: int, tmp_path: Path) -> None:
    warmed = run_stage(tmp_path / "warm", WARM_UP, seed) / "checkpoints"
    stage = GRPO.replace("{run}/sft/checkpoints", str(warmed)).replace("eval_interval = 20", "eval_interval = 10")
    found, target = {}, None
    for loop, flags in LOOPS.items():
        found[loop] = run_stage(tmp_path / loop, stage, seed, *flags, target=target)
        target = course(found[loop])[-1][1] if target is None else target
    courses = {loop: course(root) for loop, root in found.items()}
    reached = {}
    for loop, points in courses.items():
        reached[loop] = next((seconds for seconds, accuracy in points if accuracy >= target), None)
        steps = metrics(found[loop])
        stale = sum(row["staleness/mean"] for row in steps.values()) / len(steps)
        print(f"seed {seed}, {loop}: {target:.3f} after {reached[loop]} s; mean staleness {stale:.2f}; course {points}")
    assert reached["fully-async"] is not None and reached["fully-async"] < courses["sync"][-1][0]
    assert max(row["staleness/max"] for row in metrics(found["fully-async"]).values()) <= 2
