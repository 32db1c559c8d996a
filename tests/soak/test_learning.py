"""Estimators learn to be right in a working that they already have, from one supervised warm-up a seed; what carries no
such lesson does not learn.

SEED names the seeds, with commas between; to the file LEARNED what was found is added (support/learning_picture.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.report.closing_line import held_out
from tests.support.learning_picture import Learned, keep
from tests.support.runs import REPO, Run, all_gone

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SHARED, WARM_UP, *ESTIMATORS = (REPO / "examples" / "estimators.toml").read_text().split("[[stage]]\n")
STAGES = {re.search(r'name = "(\w+)"', stage).group(1): stage for stage in ESTIMATORS}
SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,7,1234").split(",")]
#: name -> (the stage that it changes, options)
CONTROLS = {
    name: (
        "grpo_kl",
        (
            "--custom-reward-post-process-path",
            f"tests.support.must_not_learn.{name}",
            "--disable-rewards-normalization",
        ),
    )
    for name in ("sign_flipped", "no_baseline", "shuffled")
}


def run_stage(directory: Path, stage: str, seed: int, *options: str) -> Path:
    """Run one stage of the recipe as a run of its own; its directory."""
    recipe = directory / "recipe.toml"
    recipe.write_text(SHARED.replace("{recipe}/", f"{REPO}/examples/") + "[[stage]]\n" + stage)
    root = directory / "run"
    run = Run(recipe, "--run-dir", root, "--seed", str(seed), *options, root=root)
    status, out = run.end(900)
    assert status == 0, out + run.logs()
    assert all_gone(root, [])
    return root / re.search(r'name = "(\w+)"', stage).group(1)


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Seed -> the checkpoints of its warm-up, made when first asked for."""
    made: dict[int, Path] = {}

    def checkpoints(seed: int) -> Path:
        if seed not in made:
            made[seed] = run_stage(tmp_path_factory.mktemp(f"seed-{seed}"), WARM_UP, seed) / "checkpoints"
        return made[seed]

    return checkpoints


def accuracies(name: str, seed: int, warm_up: Path, directory: Path) -> list[float]:
    """Held-out accuracy before the first step, on the way, and after the last, of an estimator or a control."""
    stage, options = CONTROLS.get(name, (name, ()))
    text = STAGES[stage].replace("{run}/sft/checkpoints", str(warm_up))
    points = held_out(run_stage(directory, text, seed, *options))["heldout"]
    found = Learned(
        name, name in CONTROLS, seed, [1 + rollout for rollout, _ in points], [value for _, value in points]
    )
    print(f"{name}, seed {seed}: " + " -> ".join(f"{value:.3f}" for value in found.accuracy), flush=True)
    if file := os.environ.get("LEARNED"):
        keep(Path(file), found)
    assert 0.4 <= found.accuracy[0] <= 0.6, "what the warm-up leaves to be learned"
    return found.accuracy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STAGES)
def test_an_estimator_learns(name: str, seed: int, warmed_up: Callable[[int], Path], tmp_path: Path) -> None:
    assert accuracies(name, seed, warmed_up(seed), tmp_path)[-1] >= 0.8


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_does_not_learn(name: str, seed: int, warmed_up: Callable[[int], Path], tmp_path: Path) -> None:
    found = accuracies(name, seed, warmed_up(seed), tmp_path)
    assert found[-1] <= found[0] + 0.1
