"""Operations of a model's passes: published sizes, and those that torch counts of Megatron's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.models.family import find_family
from hpcrl.planning.formulas.flops import model_flops, pairs
from hpcrl.planning.formulas.gpu_specs import CARDS, named, of_device
from tests.support.families import DELTA_NETS, SIZES, make
from tests.support.published_models import MODELS
from tests.support.ranks import run_ranks
from tests.support.shares import plain_sample, share_of

#: parameters that a token meets, in billions, as the models' names or pages say (without embeddings)
ACTIVE = {
    "Qwen3-Next-80B-A3B": 3.3,
    "Qwen3.5-35B-A3B": 3.0,
    "Qwen3-30B-A3B": 3.3,
    "Qwen3-235B-A22B": 22.0,
    "GLM-4.5": 32.0,
    "GLM-4.5-Air": 12.0,
    "Qwen3-4B": 4.0,
    "DeepSeek-R1": 37.0,
    "Kimi-K2-Instruct": 32.0,
    "MiniMax-M2": 10.0,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_published(name: str) -> None:
    config = MODELS[name][1]
    model = model_flops(find_family(config, name), config)
    assert (model.met + model.head) / 1e9 == pytest.approx(ACTIVE[name], rel=0.1)


def test_causal_pairs() -> None:
    assert pairs([1, 3]) == 1 + (1 + 2 + 3)


def test_cards_are_found_by_their_names() -> None:
    """A name of the driver's leads to one card; a part of a GPU, and an unknown one, to none."""
    names = [device for card in CARDS.values() for device in card.devices]
    assert len(names) == len(set(names))
    assert all(of_device(device) == card for card in CARDS.values() for device in card.devices)
    assert of_device("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None and of_device("cpu") is None
    with pytest.raises(UsageError, match="h100-sxm"):
        named("h100")


def test_page_lists_the_cards() -> None:
    page = (Path(__file__).parents[3] / "docs/sizing.md").read_text()
    for name, card in CARDS.items():
        assert f"| `{name}` | {card.memory:g} | {card.tflops:g} |" in page


LENGTH = 24
PROMPT = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    # of a gated delta net torch counts products of whole chunks, and computes them twice
    return {name: make(root / name, name) for name in SIZES if name not in DELTA_NETS}


def attention() -> dict[Any, Any]:
    """How torch counts attention on other devices, for its operators on the CPU, which it does not list."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }


def counted(every: list[Options]) -> list[tuple[float, float, float, dict[str, float]]]:
    """On a rank, of each model: what torch counts of training on a share, our count of it with all pairs of a sample, our
    count as it is, and what would be logged on a known card."""
    from torch.utils.flop_counter import FlopCounterMode

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import hf_weights, model
    from hpcrl.trainer.step.speed import of_step, operations, reached
    from hpcrl.trainer.step.train_batch import train

    ranks = parallel_state.initialize(every[0])
    found = []
    for opts in every:
        policy = model.build(opts, ranks)
        hf_weights.load_hf(policy, opts.hf_checkpoint)
        samples = [plain_sample(PROMPT, LENGTH - PROMPT, group_index=n, response_index=0) for n in range(4)]
        share = share_of(samples)
        share.step_tokens = [4 * (LENGTH - PROMPT)]
        with FlopCounterMode(display=False, custom_mapping=attention()) as torchs:
            train(policy, ranks, opts, share)
        work = 4 * LENGTH, 4 * LENGTH * LENGTH, share.step_tokens[0]
        flops = model_flops(policy.family, policy.hf_config)
        ours = flops.training(*work) + flops.pair / 2 * work[1]  # flash attention computes the scores once more
        logged = reached(policy, opts.model_copy(update={"bf16": True}), share, 2.0, True, CARDS["l40s"])
        logged |= of_step(opts.model_copy(update={"rollout_num_gpus": 3}), share, 2.0, 0.5)
        found.append((float(torchs.get_total_flops()), ours, operations(policy, opts, share, True), logged))
    return found


@pytest.mark.process
def test_operations_are_those_that_torch_counts(models: dict[str, Path]) -> None:
    """Within 1 %, of every family without gated delta nets: torch counts attention's products over the whole square of a sample, and in
    its backward pass the scores once more."""
    values: dict[str, Any] = {"bf16": False, "actor_num_gpus_per_node": 1, "lr": 1e-6, "max_logprob_diff": 1e9}
    every = [Options(hf_checkpoint=str(path), **values) for path in models.values()]
    (found,) = run_ranks(1, counted, every, timeout=240)
    for name, (torchs, square, ours, logged) in zip(models, found, strict=True):
        assert square == pytest.approx(torchs, rel=0.01), name
        assert ours < square
        assert logged["perf/mfu"] == pytest.approx(ours / (2.0 * 362e12))
        assert logged["perf/train_tokens_per_sec"] == logged["perf/train_tokens_per_sec_per_gpu"] == 4 * LENGTH / 2.0
        assert logged["perf/step_tokens_per_sec_per_gpu"] == 4 * LENGTH / 2.0 / (1 + 3)
