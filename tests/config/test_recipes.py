"""The recipes of docs/algorithms.md: each is named there, resolves, and every option that the page sets there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text().partition("\n## Loops\n")[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


REPO = Path(__file__).parents[2]


def test_every_recipe_can_run_and_is_named() -> None:
    assert RECIPES
    for path in RECIPES:
        assert f"examples/recipes/{path.name}" in PAGE
        assert resolve_stages(load_recipe(path), {}, {"run": "/run", "prepared": "/run/prepared"})


def test_every_option_that_the_page_names_exists() -> None:
    for name in set(re.findall(r"`--([a-z][\w-]+)", PAGE)):
        assert name.replace("-", "_") in Options.model_fields, name


def test_dapo_is_all_of_it() -> None:
    (options,) = resolve_stages(
        load_recipe(ROOT / "examples" / "recipes" / "dapo_dynamic_sampling.toml"),
        {},
        {"run": "/run", "prepared": "/run/prepared"},
    )
    assert options.dynamic_sampling_filter_path == "check_reward_nonzero_std" and options.leaves_groups_over
    assert options.eps_clip_high > options.eps_clip and options.calculate_per_token_loss and options.overlong_buffer_len
    assert options.partial_rollout and options.staleness_bound == options.max_staleness


@pytest.mark.parametrize(
    ("name", "given", "seconds"),
    [
        ("glm-4.5-355b-64gpu", {}, 3600.0),
        ("glm-4.5-355b-64gpu", {"timeout_factor": 2.0}, 7200.0),
        ("glm-4.5-355b-64gpu", {"engine_start_timeout": 60.0}, 60.0),
        ("glm-4.5-355b-64gpu-bf16", {}, 900.0),
        ("glm-4.5-355b-64gpu-bf16", {"timeout_factor": 2.0}, 1800.0),
    ],
)
def test_time_to_compile_kernels_of_experts(name: str, given: dict[str, float], seconds: float) -> None:
    places = {"run": "/run", "prepared": "/run/prepared"}
    (options,) = resolve_stages(load_recipe(ROOT / "examples" / f"{name}.toml"), given, places)
    assert options.engine_start_timeout == seconds


@pytest.mark.parametrize("deep", ["[" * 9000 + "]" * 9000, "9" * 5000, "0x" + "F" * 9000], ids=["deep", "long", "hex"])
@pytest.mark.parametrize("kind", ["recipe", "site", "flag", "number"])
def test_deep_values_are_one_error(kind: str, deep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(f"{'seed' if kind == 'number' else 'extra'} = {deep}\n")
    words = {
        "recipe": [str(file)],
        "number": [str(file)],
        "site": [str(REPO / "examples/quickstart.toml"), "--site", str(file)],
        "flag": [str(REPO / "examples/quickstart.toml"), "--set", f"trainer.extra={deep}"],
    }
    planned = kind in ("recipe", "number")
    assert main(["plan" if planned else "submit", *words[kind], *([] if planned else ["--dry-run"])]) == 2
    said = capsys.readouterr().err
    assert said.count("hpcrl: error") == 1 and "Traceback" not in said and len(said.splitlines()) < 5


@pytest.mark.parametrize("name", ["x\ny", "x\x1b[0m", "x\0y", "x\u202ey"])
def test_names_that_no_path_should_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--name", "--run-dir"):
        assert main(["submit", str(REPO / "examples/quickstart.toml"), f"{flag}={name}", "--dry-run"]) == 2
        assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lr = 1\nname = 'x'\nlr = 2\n", "lr"),
        ("[[stage]]\nseed = 1\n  seed  = 2\n", "seed"),
        ("a.b = 1\na.b = 2", "a.b"),
    ],
)
def test_a_key_that_is_given_twice_is_named(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError, match=rf"r\.toml .*{re.escape(key)} is given twice: "):
        load_recipe(tmp_path / "r.toml")
