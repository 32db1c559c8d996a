"""The recipes with an adapter, planned as a user plans them: they fit, and docs/lora.md has what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cli import main
from tests.documents.scene import published_models

ROOT = Path(__file__).parents[2]
QWEN = "examples/qwen3-30b-a3b-lora-4gpu.toml --hostfile hostfiles/1x4.txt"
GLM = "examples/glm-4.5-355b-lora-16gpu.toml --hostfile hostfiles/2x8.txt"
Planned = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planned:
    """What `hpcrl plan` prints of a line, typed where the models' config.json are below data/."""
    published_models(tmp_path / "data")
    for name in ("examples", "hostfiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)

    def plan(line: str) -> str:
        assert main(["plan", *line.split()]) == 0
        return capsys.readouterr().out

    return plan


@pytest.mark.parametrize("line", [QWEN, GLM])
def test_a_recipe_with_an_adapter_fits(planned: Planned, line: str) -> None:
    """Every turn of a GPU, without a warning; the block of the page below the command is what is printed."""
    text = planned(line)
    assert "warn:" not in text
    taken = re.search(r"of both on one GPU while (.*)", text)
    assert taken
    most = max(map(float, re.findall(r": ([\d.]+)", taken[1])))
    assert most < 79.1  # GiB of an H100 of 80 GB
    assert f"{most} of 80 GiB" in (ROOT / "docs" / "recipes.md").read_text()
    assert re.search(r"of it the adapter: [\d.]+ = .*gradients .*optimizer .*; [\d,]+ million", text)
    page = (ROOT / "docs" / "lora.md").read_text()
    block = page.partition(f"    hpcrl plan {line}\n")[2].lstrip("\n").partition("\n\n")[0]
    lines = [row.removeprefix("    ") for row in block.splitlines()]
    assert len(lines) > 3 and [row for row in lines if row not in text.splitlines()] == []


@pytest.mark.parametrize(
    ("more", "turn", "gib"),
    [
        ("--hf-checkpoint data/GLM-4.5 --vllm-data-parallel-size 1", "weights are updated", 95),
        ("--ref-load data/GLM-4.5_torch_dist", "start", 81),
    ],
)
def test_what_does_not_fit_on_16_gpus(planned: Planned, more: str, turn: str, gib: int) -> None:
    """Engines in BF16 next to the trainer's weights; a base in torch_dist, whose halves are put together."""
    text = planned(f"{GLM} {more}")
    assert "warn:" in text
    found = [float(size) for size in re.findall(rf"{turn}: ([\d.]+)", text)]
    assert max(found) > max(gib, 80)
