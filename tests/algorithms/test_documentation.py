"""docs/algorithms.md names everything there is, with its source; every recipe that it names can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from hpcrl.algorithms import corrections, estimators, kl, losses
from hpcrl.config.options import AlgorithmOptions, DistillationOptions, OffPolicyOptions
from hpcrl.config.plugin_names import Kind, algorithm_files
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.rules.algorithm_needs import policy_loss_name

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "algorithms.md").read_text()
RECIPES = sorted((ROOT / "examples" / "algorithms").glob("*.toml"))
FOLDERS = {"estimators": estimators, "losses": losses, "corrections": corrections, "kl": kl}
TITLES = {"estimators": "estimators", "losses": "policy losses", "corrections": "corrections", "kl": "KL estimators"}


def rows(kind: str) -> dict[str, str]:
    """Name -> its row in the table, below the title of its kind."""
    part = DOC.partition(f"| **{TITLES[kind]}** |")[2].partition("| **")[0]
    return {line.split("`")[1]: line for line in part.splitlines() if line.startswith("| `")}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_table_has_all_with_their_sources(kind: Kind) -> None:
    found = rows(kind)
    assert set(algorithm_files(kind)) <= set(found)
    for name in algorithm_files(kind):
        text = (Path(str(FOLDERS[kind].__file__)).parent / f"{name}.py").read_text()
        sources = re.findall(r"arXiv:(\d{4}\.\d{5})", text)
        assert "Source: " in text and ("Use: " in text or kind == "kl"), name
        assert not sources or any(source in found[name] for source in sources), name


def test_every_option_of_an_algorithm_is_named() -> None:
    for name in {
        *AlgorithmOptions.__annotations__,
        *OffPolicyOptions.__annotations__,
        *DistillationOptions.__annotations__,
    }:
        assert f"--{name.replace('_', '-')}" in DOC, name


def test_every_recipe_can_run_and_is_named() -> None:
    assert {path.name for path in RECIPES} == set(re.findall(r"`(\w+\.toml)`", DOC))
    chosen = []
    for path in RECIPES:
        recipe = load_recipe(path)
        chosen += resolve_stages(recipe, {}, {"run": "/run", "prepared": "/run/prepared"})
    policy = [o for o in chosen if o.loss_type == "policy_loss"]
    assert {o.advantage_estimator for o in policy} == set(algorithm_files("estimators"))
    assert {policy_loss_name(o) for o in policy} == set(algorithm_files("losses"))
    assert {o.custom_tis_function_path or "tis" for o in policy if o.use_tis} == set(algorithm_files("corrections"))
    assert {o.loss_type for o in chosen} == {"policy_loss", "sft_loss", "dpo_loss"}


def test_the_example_of_an_own_estimator_works() -> None:
    import torch

    from tests.algorithms.batches import options, random_samples, rollout_batch

    found: dict[str, object] = {}
    code = DOC.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/algorithms.md", "exec"), found)
    samples = random_samples(0)
    advantages = found["estimate"](rollout_batch(samples), options()).advantages  # type: ignore[operator]
    assert advantages.shape == (sum(s.length for s in samples),)
    assert torch.isfinite(advantages).all()
