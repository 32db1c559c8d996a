"""What docs/slurm.md has a user type, typed into the shell of a real `salloc`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hpcrl.run.summary import read_summary
from tests.documents.scene import Scene, make_scene
from tests.documents.texts import REPO
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

NODE = "gpus_per_node = 0\ncpus_per_node = 8\nmem = '8G'\n"
SITE = f"[trainer]\n{NODE}[engine]\n{NODE}"
#: a recipe that fine-tunes stands in for the user's where no engine is needed
TUNED = ("recipe.toml", "tuned.toml")
REWARDED = ("recipe.toml", "rewarded.toml")


def sessions() -> list[list[str]]:
    """The lines of the section's code blocks, without comments."""
    page = (
        (REPO / "docs/slurm.md").read_text().partition("\n## Many tries in one allocation\n")[2].partition("\n## ")[0]
    )
    blocks = re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)
    return [[re.sub(r"\s{2,}# .*", "", line.strip()) for line in block.splitlines()] for block in blocks]


def type_in(cluster: Cluster, scene: Scene, lines: list[str], stands_for: tuple[str, str]) -> str:
    """Everything up to the salloc in a shell of the login node, and the rest in that of salloc; what was printed."""
    at = next(i for i, line in enumerate(lines) if line.startswith("salloc "))
    environment = scene.environment(Path(sys.executable).parent)
    said = ""
    (scene.folder / "typed").write_text("\n".join(lines[at + 1 :]).replace(*stands_for))
    for text in ("\n".join(lines[:at]).replace(*stands_for), f"{lines[at]} bash -ex typed"):
        done = cluster.run(text, env=environment, cwd=scene.folder, check=False, timeout=400)
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    return said


def test_one_try_after_another(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Two runs in one allocation; the second has an option of its own."""
    scene = make_scene(tmp_path / "scene", task / "model", site=SITE)
    type_in(cluster, scene, sessions()[0], TUNED)
    assert [tried(scene, name)["lr"] for name in ("try-1", "try-2")] == [1e-3, 3e-6]


@pytest.mark.soak
def test_engines_stay_up_between_tries(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """One engine on the second node, two runs that borrow it."""
    scene = make_scene(tmp_path / "scene", task / "model", site=SITE)
    said = type_in(cluster, scene, sessions()[1], REWARDED)
    assert [tried(scene, name)["lr"] for name in ("try-3", "try-4")] == [1e-3, 3e-6]
    assert "and not node2" in said


def tried(scene: Scene, name: str) -> dict[str, object]:
    """The options of a run that has finished."""
    root = scene.folder / "runs" / name
    assert read_summary(root).finished
    return json.loads((root / "options.json").read_text())
