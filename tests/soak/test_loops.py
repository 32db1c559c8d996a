"""On the quick start's task the fully asynchronous loop reaches the held-out accuracy of the synchronous one in less wall time.

From one supervised warm-up a seed, the loops one after another on the same machine; time counts from the evaluation before the first
step to the first evaluation that is as good as the synchronous loop's last.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import REPO, Run, all_gone, metrics, rows

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SHARED, WARM_UP, GRPO = (REPO / "examples" / "quickstart.toml").read_text().split("[[stage]]\n")
SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,2,3").split(",")]
#: flags of each loop; the second has half as many rollouts more to get there
LOOPS: dict[str, list[str]] = {
    "sync": [],
    "fully-async": ["--loop", "fully-async", "--max-staleness", "2", "--use-tis", "--num-rollout", "120"],
}


def run_stage(directory: Path, stage: str, seed: int, *flags: str) -> Path:
    """Run one stage of the recipe as a run of its own: the stage's directory."""
    directory.mkdir(exist_ok=True)
    recipe = directory / "recipe.toml"
    recipe.write_text(SHARED.replace("{recipe}/", f"{REPO}/examples/") + "[[stage]]\n" + stage)
    root = directory / "run"
    run = Run(recipe, "--run-dir", root, "--seed", str(seed), *flags, root=root)
    status, out = run.end(1200)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    return root / re.search(r'name = "(\w+)"', stage).group(1)


def course(root: Path) -> list[tuple[float, float]]:
    """(seconds since the first evaluation, held-out accuracy) of every evaluation."""
    found: list[dict[str, Any]] = [row for row in rows(root) if "eval/heldout/accuracy" in row]
    return [(row["time"] - found[0]["time"], row["eval/heldout/accuracy"]) for row in found]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loop_that_never_waits_is_there_sooner(seed: int, tmp_path: Path) -> None:
    warmed = run_stage(tmp_path / "warm", WARM_UP, seed) / "checkpoints"
    stage = GRPO.replace("{run}/sft/checkpoints", str(warmed)).replace("eval_interval = 20", "eval_interval = 10")
    found = {loop: run_stage(tmp_path / loop, stage, seed, *flags) for loop, flags in LOOPS.items()}
    courses = {loop: course(root) for loop, root in found.items()}
    target = courses["sync"][-1][1]
    reached = {}
    for loop, points in courses.items():
        reached[loop] = next((seconds for seconds, accuracy in points if accuracy >= target), None)
        steps = metrics(found[loop])
        stale = sum(row["staleness/mean"] for row in steps.values()) / len(steps)
        print(f"seed {seed}, {loop}: {target:.3f} after {reached[loop]} s; mean staleness {stale:.2f}; course {points}")
    assert reached["fully-async"] is not None and reached["fully-async"] < courses["sync"][-1][0]
    assert max(row["staleness/max"] for row in metrics(found["fully-async"]).values()) <= 2
