"""Which shapes are proposed: whole ones, and each number of nodes in its turn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.fit.search import PLACES, NearMiss
from hpcrl.fit.shapes import engine_sizes, layouts, node_counts, own_shape, splits
from hpcrl.models.family import find_family
from hpcrl.plan import local_hosts
from tests.fit.models import recipe, search
from tests.support.published_models import MODELS

FIELDS = {
    name: find_family(MODELS[name][1], name).transformer(MODELS[name][1])
    for name in ("Qwen3-4B", "Qwen2.5-7B", "GLM-4.5")
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("gpus", [1, 6, 8, 64])
def test_layouts_divide_ranks_and_model(name: str, gpus: int) -> None:
    """Heads, key-value heads, layers, experts and ranks; TP stays in a node; none comes twice; a pipeline comes last."""
    fields, found = FIELDS[name], list(layouts(FIELDS[name], gpus, min(gpus, 8), None))
    experts = fields.get("num_moe_experts") or 1
    for one in found:
        assert gpus % (one.tp * one.pp * one.cp) == 0 and gpus % (one.tp * one.ep * one.pp) == 0
        assert fields["num_attention_heads"] % one.tp == 0 and one.tp <= 8
        assert fields["num_query_groups"] % one.tp == 0 or one.tp % fields["num_query_groups"] == 0
        assert fields["num_layers"] % one.pp == 0 and experts % one.ep == 0
    assert found and len(found) == len(set(found))
    assert [one.pp for one in found] == sorted(one.pp for one in found)


def test_numbers_of_nodes_and_splits() -> None:
    """Few nodes one by one; of many powers of two, three times such, the recipe's own and the most."""
    assert node_counts(3, 1) == [1, 2, 3]
    assert node_counts(50, 20) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 48, 50]
    assert list(splits(1, 4)) == [(1, 1, 3), (1, 2, 2), (1, 3, 1)]
    assert list(splits(3, 8)) == [(1, 8, 16), (2, 8, 8)]
    for trainers, each, gpus in splits(48, 8):
        assert trainers * each + gpus == 48 * 8


def test_sizes_of_engines(tmp_path: Path) -> None:
    """Inside a node or whole nodes, as its heads allow; one that divides its requests keeps the GPUs of a part."""
    base = search(recipe(tmp_path)).base
    assert [size for size, _ in engine_sizes(FIELDS["Qwen3-4B"], 16, 8, base)] == [1, 2, 4, 8, 16]
    assert [size for size, _ in engine_sizes(FIELDS["Qwen3-4B"], 6, 8, base)] == [1, 2]
    parted = base.model_copy(update={"rollout_num_gpus_per_engine": 8, "vllm": {"data_parallel_size": 4}})
    assert list(engine_sizes(FIELDS["GLM-4.5"], 16, 8, parted)) == [(2, 1), (4, 2), (8, 4), (16, 8)]


def test_what_is_found_passes_the_plan(tmp_path: Path) -> None:
    """Every shape that is said to hold the run passes the checks of `hpcrl plan` as a recipe, and fits its card."""
    from hpcrl.launch.preflight import refuse_settings

    path = recipe(tmp_path)
    looking = search(path, memory=40.0)
    found = looking.shapes(3).fitting
    assert {one.nodes for one in found} >= {1, 2}
    for one in found:
        options = resolve_stages(load_recipe(path), one.settings, PLACES)
        refuse_settings(options, local_hosts, packages=False)
        assert own_shape(options[0]) == one.shape
        assert one.memory <= 40.0 and one.nodes * 8 >= one.shape.ranks


def test_less_memory_never_holds_more(tmp_path: Path) -> None:
    """What a small card holds a larger one holds too, and more GPUs make no rollout slower."""
    path = recipe(tmp_path)
    small, large = (search(path, memory=size).shapes(2).fitting for size in (40.0, 80.0))
    assert {(one.nodes, one.shape.shared) for one in small} <= {(one.nodes, one.shape.shared) for one in large}
    fastest = {count: min(one.speed.step(0.0) for one in large if one.nodes == count) for count in (1, 2)}
    assert fastest[2] < fastest[1]


def test_what_flags_set_stays(tmp_path: Path) -> None:
    """A flag of the shape is in every shape."""
    found = search(recipe(tmp_path), tensor_model_parallel_size=4, colocate=True).shapes(2)
    assert found.fitting
    assert all(one.shape.layout.tp == 4 and one.shape.shared for one in found.fitting)


def test_the_nearest_says_what_is_missing(tmp_path: Path) -> None:
    """Of shapes that do not hold the run: rank, phase, and how many GiB are too few."""
    looking = search(recipe(tmp_path), memory=6.0)
    found = looking.shapes(1)
    assert not found.fitting
    nearest = found.nearest
    assert isinstance(nearest, NearMiss) and nearest.over == min(miss.over for miss in found.missed)
    assert "rank 0" in nearest.why and "6 a GPU" in nearest.why
    assert 0 < nearest.over < math.inf
