"""The recipes with an adapter, planned as a user plans them: they fit, and docs/models.md has what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.models.family import find_family
from hpcrl.planning.formulas.engine_memory import engine_terms
from hpcrl.planning.formulas.training_memory import GIB, fullest_rank
from hpcrl.planning.memory.report import UPDATES, memory_lines, turns
from tests.documents.scene import published_models
from tests.support.published_models import MODELS
from tests.support.small_recipes import FP8

ROOT = Path(__file__).parents[3]
USABLE = 79.1  #: GiB of an H100 of 80 GB
LINES = (
    "examples/qwen3-30b-a3b-lora-4gpu.toml --hostfile hostfiles/1x4.txt",
    "examples/glm-4.5-355b-lora-16gpu.toml --hostfile hostfiles/2x8.txt",
)


@pytest.mark.parametrize("line", LINES)
def test_a_recipe_with_an_adapter_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Every turn of a GPU, without a warning; the pages have what is printed."""
    published_models(tmp_path / "data")
    for name in ("examples", "hostfiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *line.split()]) == 0
    text = capsys.readouterr().out
    assert "warn:" not in text
    taken = re.search(r"on one GPU while (.*)", text)
    assert taken
    most = max(map(float, re.findall(r": ([\d.]+)", taken[1])))
    assert most < USABLE
    assert f"{most} of 80 GiB" in (ROOT / "docs" / "algorithms.md").read_text()
    assert re.search(r"the adapter: [\d.]+ = .*gradients .*optimizer .*; [\d,]+ million", text)
    page = (ROOT / "docs" / "models.md").read_text()
    block = page.partition(f"    hpcrl plan {line}\n")[2].lstrip("\n").partition("\n\n")[0]
    lines = [row.removeprefix("    ") for row in block.splitlines()]
    assert len(lines) > 3 and [row for row in lines if row not in text.splitlines()] == []


def test_what_does_not_fit_on_16_gpus() -> None:
    """Engines in BF16 next to the trainer's weights, however they are divided; a base in torch_dist, whose halves are
    put together.  docs/models.md has the figures."""
    (options,) = resolve_stages(load_recipe(ROOT / "examples" / "glm-4.5-355b-lora-16gpu.toml"), {}, {})
    page = (ROOT / "docs" / "models.md").read_text()
    config = MODELS["GLM-4.5"][1]
    family = find_family(config, "GLM-4.5")

    def warned(config: dict[str, Any], **changes: Any) -> list[str]:
        lines = memory_lines(options.model_copy(update=changes), family, config)
        return [line for line in lines if line.startswith("warn")]

    trainer = fullest_rank(options, family, config)
    for parts in (1, 2, 4):
        vllm = {**options.vllm, "data_parallel_size": parts}
        (said,) = warned(config, vllm=vllm)
        assert UPDATES in said
        engine = engine_terms(options.model_copy(update={"vllm": vllm}), family, config, 80 * GIB)
        together = f"{turns(options, trainer, engine)[UPDATES] / GIB:.1f} of 80 GiB"
        assert parts > 1 or together in page
    coded = config | {"quantization_config": FP8}
    assert not warned(coded)
    torch_dist = options.model_copy(update={"ref_load": "data/GLM-4.5_torch_dist"})
    start = fullest_rank(torch_dist, family, coded).phases["start"] / GIB
    assert start > 80 and f"{start:.1f} GiB" in page
    assert any("in start" in line for line in warned(coded, ref_load="data/GLM-4.5_torch_dist"))
