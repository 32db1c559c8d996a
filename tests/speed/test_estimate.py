"""The estimate of a step's speed: what bounds each role, and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.memory.engine import gpu_weights, token_bytes
from hpcrl.models.family import find_family
from hpcrl.speed.cards import CARDS
from hpcrl.speed.estimate import DENSE, PROMPT, READ, Estimate, estimate, speed_lines
from hpcrl.speed.flops import model_flops, pairs
from tests.support.published_models import MODELS

CONFIG = MODELS["Qwen3-4B"][1]
FAMILY = find_family(CONFIG, "Qwen3-4B")


def options(name: str = "qwen3-4b-8gpu", **changes: Any) -> Options:
    recipe = load_recipe(Path(__file__).parents[2] / "examples" / f"{name}.toml")
    (found,) = resolve_stages(recipe, {}, {"run": "r", "prepared": "p"})
    return found.model_copy(update=changes)


def of(opts: Options, card: str = "h100-sxm", response: int | None = 1000) -> Estimate:
    return estimate(opts, FAMILY, CONFIG, card, 80.0, response)


def test_trainer_is_bound_by_operations() -> None:
    """A reference's pass, and a training pass whose layers are computed twice, at the assumed share of the rate."""
    found = of(options()).trainer
    assert found is not None
    work = 256 * (PROMPT + 1000), 256 * pairs([PROMPT + 1000]), 256 * 1000
    model = model_flops(FAMILY, CONFIG)
    needed = model.forward(*work) + model.training(*work)
    rated = 2 * CARDS["h100-sxm"].tflops * 1e12
    assert found.seconds == pytest.approx((needed + model.forward(*work[:2], 0)) / (DENSE * rated))
    assert found.mfu == pytest.approx(needed / (found.seconds * rated))
    assert found.mfu < DENSE, "what is recomputed is not counted"
    assert found.rate == work[0] / found.seconds
    plain = of(options(use_kl_loss=False, megatron={})).trainer
    assert plain and plain.mfu == pytest.approx(DENSE)


def test_pipeline_has_a_bubble() -> None:
    one = of(options()).trainer
    two = of(options(pipeline_model_parallel_size=2, actor_num_gpus_per_node=4)).trainer
    assert one and two and one.seconds / 2 < two.seconds < one.seconds


def test_engines_are_bound_by_memory() -> None:
    """Weights and the cache of all requests are read for each of their tokens; a faster memory is faster, more
    operations are not."""
    opts = options(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    found = of(opts)
    assert found.engines and found.at_once == 64
    cache = 64 * (PROMPT + 500) * token_bytes(opts, FAMILY, CONFIG)
    read = (gpu_weights(opts, FAMILY, CONFIG) + cache) / (READ * CARDS["h100-sxm"].bandwidth * 1e9)
    assert found.engines.seconds == pytest.approx(1000 * read, rel=0.05), "and the prompts"
    h200 = of(opts, "h200-sxm").engines
    assert h200 and h200.seconds == pytest.approx(found.engines.seconds * 3350 / 4800, rel=0.02)


def test_roles_wait_for_each_other_or_do_not() -> None:
    """In sync a step is the sum, ahead the longer part; the update is added."""
    sync = of(options())
    ahead = of(options("qwen3-4b-8gpu-async"))
    assert sync.trainer and sync.engines and ahead.trainer and ahead.engines
    assert sync.step(3.0) == sync.trainer.seconds + sync.engines.seconds + 3.0
    assert ahead.step(3.0) == max(ahead.trainer.seconds, ahead.engines.seconds) + 3.0


def test_engines_sample_for_other_adapters() -> None:
    """Of several adapters the step of the one that samples most, with its own lengths; engines do not wait."""
    several = {"a": {"n_samples_per_prompt": 1}, "b": {"rollout_max_response_len": 16384}, "c": {}}
    found = of(options(use_kl_loss=False, lora_rank=8, adapter=several), response=None)
    assert found.response == 8192 and found.ahead
    own = options(use_kl_loss=False, lora_rank=8, rollout_max_response_len=16384)
    assert found.trainer == of(own, response=None).trainer


def test_assumptions_are_printed() -> None:
    found = of(options(), response=None)
    said = "\n".join(speed_lines(found, 1.0))
    assert found.response == 4096 and "responses of 4096 tokens" in said
    for word in (f"prompts of {PROMPT}", f"{DENSE:.0%} of the rated operations", f"{READ:.0%} of the rated bandwidth"):
        assert word in said
    assert CARDS["h100-sxm"].source in said
    assert "engines: " not in "\n".join(speed_lines(of(options(rollout_num_gpus=0, loss_type="sft_loss")), 0.0))


def test_page_lists_the_cards() -> None:
    page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
    for name, card in CARDS.items():
        assert f"| `{name}` | {card.memory:g} | {card.tflops:g} | {card.bandwidth:g} |" in page
