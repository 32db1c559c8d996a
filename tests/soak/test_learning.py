"""Estimators learn the quick start's task, from one supervised warm-up a seed: held-out accuracy up by at least 25
points."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import REPO, Run, all_gone

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SHARED, WARM_UP, *ESTIMATORS = (REPO / "examples" / "four-estimators.toml").read_text().split("[[stage]]\n")
NAMES = [re.search(r'name = "(\w+)"', stage).group(1) for stage in ESTIMATORS]
SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,7").split(",")]


def run_stage(directory: Path, stage: str, seed: int) -> tuple[Path, str]:
    """Run one stage of the recipe as a run of its own: (its run directory, what it said at last)."""
    recipe = directory / "recipe.toml"
    recipe.write_text(SHARED.replace("{recipe}/", f"{REPO}/examples/") + "[[stage]]\n" + stage)
    root = directory / "run"
    run = Run(recipe, "--run-dir", root, "--seed", str(seed), root=root)
    status, out = run.end(580)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    return root, out.splitlines()[-1]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Seed -> the checkpoints of its warm-up, made when first asked for."""
    made: dict[int, Path] = {}

    def checkpoints(seed: int) -> Path:
        if seed not in made:
            made[seed] = run_stage(tmp_path_factory.mktemp(f"seed-{seed}"), WARM_UP, seed)[0] / "sft" / "checkpoints"
        return made[seed]

    return checkpoints


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_learns(name: str, seed: int, warmed_up: Callable[[int], Path], tmp_path: Path) -> None:
    stage = ESTIMATORS[NAMES.index(name)].replace("{run}/sft/checkpoints", str(warmed_up(seed)))
    _, last = run_stage(tmp_path, stage, seed)
    before, after = (float(x) for x in re.fullmatch(r"held-out accuracy: (\S+) -> (\S+)  .*", last).groups())
    print(f"{name}, seed {seed}: {before:.2f} -> {after:.2f}")
    assert 0.2 <= before <= 0.5, "supervised warm-up leaves the model middling"
    assert after >= before + 0.25
