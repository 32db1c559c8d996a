"""Every documented command that starts a run on this machine, and every recipe for CPUs, run for real with two rollouts
a stage.

The rest of the line is as printed; `--num-rollout 2` (for each stage by its name) is all that is added.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.recipe import load_recipe
from tests.documents.scene import Scene, make_scene
from tests.documents.texts import REPO, Command, printed
from tests.documents.which import cheap

pytestmark = pytest.mark.soak

#: commands of `hpcrl run` and `hpcrl eval` that start something here, without those that other tests run as they are
RUNS = list(
    {
        command.line: command
        for command in printed()
        if command.verb in ("run", "eval") and cheap(command) and not {"--dry-run", "--site", "--"} & set(command.words)
    }.values()
)
#: why a line cannot run here as it is printed
NOT_HERE = {
    "--load runs/x/checkpoints": "begins from a checkpoint of the user's",
    "--hf-checkpoint MODEL-FP8": "vLLM has no FP8 on CPUs",
    "--colocate": "needs GPUs that trainer and engines share; tests/whole_runs/test_grpo_run.py shares slots on the "
    "CPU",
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), task / "model")


@pytest.mark.parametrize("command", RUNS, ids=lambda command: command.line.removeprefix("hpcrl ")[:60])
def test_it_runs(scene: Scene, command: Command) -> None:
    if why := next((why for words, why in NOT_HERE.items() if words in command.line), ""):
        pytest.skip(why)
    line = f"{scene.filled(command)} {shorter(scene, command)}"
    environment = scene.environment(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-c", line],
        env=environment,
        cwd=scene.folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def shorter(scene: Scene, command: Command) -> str:
    """The flags that make a run of two rollouts a stage; an evaluation has none."""
    if command.verb == "eval" or "num-rollout" in command.line:
        return ""
    recipe = load_recipe(scene.folder / shlex.split(scene.filled(command))[2])
    stages = [stage.name for stage in recipe.stages if stage.name]
    flags = [f"--{stage}.num-rollout 2" for stage in stages] or ["--num-rollout 2"]
    # of two rollouts a critic can have one to itself
    flags += [
        f"--{stage.name}.num-critic-only-steps 1" for stage in recipe.stages if "num_critic_only_steps" in stage.values
    ]
    return " ".join(flags)


def test_all_recipes_for_cpus_are_among_them() -> None:
    named = {word for command in RUNS for word in command.words if word.endswith(".toml")}
    here = {str(path.relative_to(REPO)) for path in (REPO / "examples").rglob("*.toml") if "gpu" not in path.name}
    assert here <= named
