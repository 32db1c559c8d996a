"""`hpcrl fit`: from a recipe to the table, and to the recipe of a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cli import main
from hpcrl.config.recipe import load_recipe
from tests.fit.models import RECIPE, recipe

FIT = ("fit", "--rehearse", "0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recipe(tmp_path)


def test_the_table_and_a_row_of_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says what is estimated; the row that is applied is written once, and passes `hpcrl plan`."""
    assert main([*FIT, str(path), "--max-nodes", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["seconds_per_rollout"] for row in rows] == sorted(row["seconds_per_rollout"] for row in rows)
    hours = [row["rollouts"] * row["seconds_per_rollout"] * row["nodes"] / 3600 for row in rows]
    assert [row["node_hours"] for row in rows] == pytest.approx(hours, abs=0.2)
    made = path.with_name("r-fit.toml")
    made.write_text("old")
    assert main([*FIT, str(path), "--max-nodes", "2", "--apply", "1"]) == 2
    assert main([*FIT, str(path), "--max-nodes", "2", "--apply", "1", "-o", str(path), "--force"]) == 2
    assert made.read_text() == "old"
    capsys.readouterr()
    assert main([*FIT, str(path), "--max-nodes", "2", "--apply", "1", "--force"]) == 0
    told = capsys.readouterr()
    assert "planned" in told.out and "estimates" in told.out and "r-fit.toml" in told.err
    values = load_recipe(made).values
    assert values["actor_num_nodes"] == rows[0]["settings"]["actor_num_nodes"] == 2
    assert "# of one node" in made.read_text() and "# all of a node" in made.read_text()
    assert main(["plan", str(made)]) == 0


def test_nothing_holds_the_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One error: the nearest shape, what is missing, and what to do."""
    assert main([*FIT, str(path), "--max-nodes", "1", "--gpu-memory", "6"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "up to 1 node" in told and "rank 0" in told and "--max-nodes" in told


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--apply", "99"], "--apply 99"),
        (["-o", "x.toml"], "--output"),
        (["--gpu", "h900"], "--gpu h900"),
        (["--hf-checkpoint", "nowhere"], "nowhere"),
        (["--debug-rollout-only", "--rollout-num-gpus", "8"], "--debug-rollout-only"),
        (["--max-nodes", "0"], "--max-nodes 0"),
    ],
)
def test_what_cannot_be_asked(path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    """One error, which names the flag."""
    assert main([*FIT, str(path), *words]) == 2
    assert named in capsys.readouterr().err


def test_recipes_that_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several stages, and files next to the recipe that another directory has not."""
    staged = recipe(
        tmp_path, text=RECIPE.replace("[megatron]", '[[stage]]\nname = "a"\n[[stage]]\nname = "b"\n[megatron]')
    )
    assert main([*FIT, str(staged)]) == 2
    assert "a, b" in capsys.readouterr().err
    near = recipe(tmp_path, text=RECIPE.replace('"x.jsonl"', '"{recipe}/x.jsonl"'))
    (tmp_path / "other").mkdir()
    assert main([*FIT, str(near), "--max-nodes", "1", "--apply", "1", "-o", str(tmp_path / "other" / "x.toml")]) == 2
    assert "{recipe}" in capsys.readouterr().err
