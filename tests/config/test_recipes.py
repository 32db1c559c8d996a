"""The recipes of docs/recipes.md: each is named there, resolves, and every option that the page sets there is."""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


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
