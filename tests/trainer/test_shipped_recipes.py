"""Every shipped recipe for GPUs takes its steps with its own flags and layout, on a device that knows shapes alone, with
stand-ins for Transformer Engine and DeepEP (hpcrl/planning/fake_libraries/transformer_engine.py, deep_ep.py); and the host waits
for the device only where it may.

The model is smaller, all else is what a run would build: `model.build` from the recipe's options.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.planning.memory.test_weight_update import RECIPES
from tests.support import families, small_recipes
from tests.support.allowed_waits import MEGATRONS, OF_NEWER_MEGATRON, OF_RECIPES, OURS, Wait, check, check_all_met
from tests.support.ranks import on_fake_gpu
from tests.support.trained_on_fake import Waits, trained
from tests.trainer.step import test_invariance as whole
from tests.trainer.step import test_routing_replay as replay

pytestmark = pytest.mark.process

EVERYWHERE = OURS + MEGATRONS + OF_NEWER_MEGATRON
MET: set[Wait] = set()
RAN: set[str] = set()  #: node ids of tests


@pytest.fixture(scope="module", autouse=True)
def every_wait_is_met(request: pytest.FixtureRequest) -> Iterator[None]:
    """An entry that nothing meets would let a new wait pass: looked at when all of this module has run."""
    yield
    check_all_met(request, RAN, MET, OF_RECIPES)


@pytest.fixture(autouse=True)
def ran(request: pytest.FixtureRequest) -> None:
    RAN.add(request.node.nodeid)


def of_recipe(name: str, directory: Path, rank: int) -> Waits:
    options, batch = small_recipes.small_recipe(name, directory)
    found = on_fake_gpu(trained, options, rank % options.world_size, batch)
    MET.update(check(found, EVERYWHERE + OF_RECIPES))
    return found


LARGE = [name for name in small_recipes.RECIPES if "355b" in name and "lora" not in name]


@pytest.mark.parametrize("rank", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", small_recipes.RECIPES)
def test_a_recipe_takes_its_steps(tmp_path: Path, name: str, rank: int) -> None:
    """On the first and the last rank, with the parts that it asks for."""
    parts = of_recipe(name, tmp_path, rank).parts
    wanted = ["layers Transformer Engine", "attention Transformer Engine's", "fusion on in the layers"]
    if "glm-z1" in name:
        rope = "fused" if Version(version("megatron-core")) >= Version("0.19") else "of hpcrl"
        wanted += [f"rotary embedding {rope}", "FusedAdam, distributed"]
    elif name in LARGE:
        wanted += ["rotary embedding fused", "HybridDeviceOptimizer, distributed", "grouped GEMM on"]
        wanted += ["permute fusion on", "router fusion off"]
    elif "lora" in name:
        wanted += ["rotary embedding fused", "FusedAdam, distributed", "grouped GEMM on", "permute fusion on"]
    else:
        wanted += ["rotary embedding fused", "FusedAdam, distributed"]
    assert [part for part in wanted if part not in parts] == [], parts


@pytest.mark.parametrize("name", LARGE)
def test_a_stage_between_others_does_too(tmp_path: Path, name: str) -> None:
    """It sends and receives both activations and gradients."""
    of_recipe(name, tmp_path, 20)


def test_every_recipe_for_gpus_is_here() -> None:
    assert {name: model for name, (model, *_) in RECIPES.items()} == small_recipes.RECIPES


SOFTMAX = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")  #: families whose router has no correction bias


@pytest.mark.parametrize("kind", families.one_of_each_kind(families.SIZES))
def test_families_with_the_packages(tmp_path: Path, kind: str) -> None:
    """Every family with both packages; experts between ranks by Megatron's own dispatcher, chosen and replayed."""
    experts = kind in families.EXPERTS
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    if experts:
        layout |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    model = families.make(tmp_path, kind, odd=experts, vocab_size=whole.VOCAB, num_hidden_layers=4)
    for more in (replay.R3, {}) if experts else ({"num_steps_per_rollout": 2},):
        opts = whole.options(model, 2, **{"clip_grad": 1.0, "micro_batch_size": 8, **layout, **more})
        found = on_fake_gpu(trained, opts, 1, replay.data_of(kind) if more is replay.R3 else None)
        check(found, EVERYWHERE)
        assert "layers Transformer Engine" in found.parts
        assert ("router fusion on" in found.parts) == (kind in SOFTMAX and more is not replay.R3)
