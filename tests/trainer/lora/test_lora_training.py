"""Training an adapter: the same in every layout, resumed bit for bit, over a base that stays as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.planning.formulas.parameters import Layout, on_stage
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family, make_model
from tests.trainer.step.test_invariance import VOCAB, batch, shares

pytestmark = pytest.mark.process

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_type": "canonical_lora", "lr": 3e-3}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
}
EXPERTS = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2 sp etp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2 sp ep2 etp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    return {
        "dense": make_model(root / "dense", tied=True, vocab_size=VOCAB, **small),
        "other": make_model(root / "other", tied=True, seed=3, vocab_size=VOCAB, **small),
        "moe": make_family(root / "moe", "qwen3_moe", vocab_size=VOCAB, **small | {"moe_intermediate_size": 16}),
    }


def options(model: Path, n: int = 1, **values: Any) -> Options:
    values = LORA | {"clip_grad": 1.0, "max_logprob_diff": 100.0, "weight_decay": 0.1, "adam_eps": 1e-4} | values
    return Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=n, **values)


# ---- on the ranks


def begun(opts: Options, directory: Path, ranks: Any = None) -> tuple[Any, Any, str]:
    """(policy, the other models, what was said) of a run that begins or resumes."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.resume import restore
    from hpcrl.trainer.checkpoint.save_load import step
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    policy = model.build(opts, ranks or parallel_state.initialize(opts))
    at, said, source = restore(policy, policy.ranks, opts, directory, "run")
    resumed = step(directory, at.rollout_id) if at.rollout_id else None
    return policy, ReferenceAndCritic(policy, policy.ranks, opts, resumed, source), said


def trained(policy: Any, others: Any, opts: Options, steps: int) -> list[dict[str, float]]:
    from hpcrl.trainer.step import train_batch

    mine = ShareExchange(policy.ranks).exchange(shares(opts, batch().select(range(8)))[policy.ranks.dp_rank])
    return [train_batch.train(policy, policy.ranks, opts, mine, others.of_share(0, 0)) for _ in range(steps)]


def train(every: list[Options], directory: Path, steps: int) -> list[list[dict[str, float]]]:
    ranks, found = None, []
    for opts in every:
        policy, others, _ = begun(opts, directory, ranks)
        ranks = policy.ranks
        found.append(trained(policy, others, opts, steps))
    return found


def save_between(opts: Options, directory: Path) -> tuple[list[float], bool]:
    """Losses of three steps, a checkpoint, and three more; whether the base is what it was."""
    from hpcrl.trainer.checkpoint.save_load import Position, save
    from hpcrl.trainer.lora.saved import base_digest

    policy, others, _ = begun(opts, directory)
    before = policy.base.digest
    losses = [m["train/loss"] for m in trained(policy, others, opts, 3)]
    save(policy, policy.ranks, directory, Position(3, 3, {"prompt": 7}), "run", others.save)
    losses += [m["train/loss"] for m in trained(policy, others, opts, 3)]
    return losses, base_digest(policy) == before


def resume(opts: Options, directory: Path) -> Any:
    try:
        policy, others, said = begun(opts, directory)
    except HpcrlError as error:
        return str(error)
    assert "resumed" in said
    return [m["train/loss"] for m in trained(policy, others, opts, 3)]


def held(opts: Options, directory: Path) -> tuple[int, int, int]:
    """Elements that are trained, elements in all, and this rank's pipeline stage."""
    policy, _, _ = begun(opts, directory)
    own = [p for module in policy.modules for p in module.parameters()]
    return sum(p.numel() for p in own if p.requires_grad), sum(p.numel() for p in own), policy.ranks.pp_rank


def shared_memory(opts: Options, directory: Path) -> tuple[int, int, int]:
    """Parameters of a critic: all, those in the policy's memory, and those that are trained."""
    policy, others, _ = begun(opts, directory)
    (critic,) = others.trained_too
    places = {p.data_ptr() for module in policy.modules for p in module.parameters()}
    own = [p for module in critic.modules for p in module.parameters()]
    return len(own), sum(p.data_ptr() in places for p in own), sum(p.requires_grad for p in own)


# ---- tests


def same(found: dict[str, float], wanted: dict[str, float], most: float) -> None:
    for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy", "train/critic-value_loss"):
        if name in wanted:
            assert math.isclose(found[name], wanted[name], rel_tol=most, abs_tol=most * 1e-2), name


MORE = pytest.mark.soak


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("dense", ["tp2 sp"]),
        ("moe", ["tp2 sp ep2 etp2"]),
        pytest.param("dense", ["pp2", "dp2", "cp2"], marks=MORE),
        pytest.param("moe", ["ep2", "tp2 sp etp2"], marks=MORE),
    ],
)
def test_layout_of_adapters_does_not_matter(
    models: dict[str, Path], tmp_path: Path, name: str, layouts: list[str]
) -> None:
    ((wanted,),) = run_ranks(1, train, [options(models[name], **KL)], tmp_path, 3)
    assert wanted[0]["train/kl_loss"] < 1e-9  # B is 0: the policy is the reference
    assert wanted[2]["train/kl_loss"] > 1e-5
    for layout in layouts:
        n, fields = (LAYOUTS | EXPERTS)[layout]
        found = run_ranks(n, train, [options(models[name], n, **KL, **fields)], tmp_path, 3)
        for ours, theirs in zip(found[0][0], wanted, strict=True):
            same(ours, theirs, 2e-4)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_adapters_resume_in_any_layout(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    n, fields = (LAYOUTS["tp2 sp"], EXPERTS["tp2 sp etp2"])[name == "moe"]
    opts = options(models[name], n, **KL, **fields)
    (losses, kept), _ = run_ranks(n, save_between, opts, tmp_path)
    assert kept
    stored = TorchDist(tmp_path / "iter_0000003")
    assert all("_adapter." in key for key in stored.tensors)
    assert sum(math.prod(t.shape) for t in stored.tensors.values()) < 40_000
    assert run_ranks(n, resume, opts, tmp_path)[0] == losses[3:]
    for m, others in (EXPERTS["ep2"],) if name == "moe" else ((1, {}), LAYOUTS["pp2"]):
        found = run_ranks(m, resume, options(models[name], m, **KL, **others), tmp_path)[0]
        assert found == pytest.approx(losses[3:], rel=1e-4)


def test_an_adapter_of_another_base(models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_between, options(models["dense"]), tmp_path)
    wrong = {
        "another base": options(models["other"]),
        "--lora-alpha": options(models["dense"], lora_alpha=4),
        "--lora-rank": options(models["dense"], lora_rank=2),
        "--target-modules": options(models["dense"], target_modules=["q_proj"]),
        "holds an adapter": options(models["dense"], lora_rank=0),
    }
    for words, opts in wrong.items():
        assert words in run_ranks(1, resume, opts, tmp_path)[0]


@pytest.mark.parametrize(("name", "layout"), [("dense", "pp2"), ("moe", "tp2 sp ep2 etp2")])
def test_a_plan_counts_what_ranks_hold(models: dict[str, Path], tmp_path: Path, name: str, layout: str) -> None:
    n, fields = (LAYOUTS | EXPERTS)[layout]
    config = read_config(models[name])
    family = find_family(config, models[name])
    for lora in (LORA, LORA | {"lora_type": "lora", "target_modules": ["linear_qkv", "down_proj"]}):
        opts = options(models[name], n, **lora | fields)
        for trained, every, stage in run_ranks(n, held, opts, tmp_path):
            layout_of = Layout.from_options(opts, family.transformer(config)["num_layers"])
            count = on_stage(family, config, layout_of, stage, opts.megatron)
            assert (count.trained, count.all) == (trained, every)


def test_a_critic_has_an_adapter_of_its_own(models: dict[str, Path], tmp_path: Path) -> None:
    fields = {"advantage_estimator": "ppo", "critic_lr": 1e-2}
    opts = options(models["dense"], **fields)
    every, shared, learns = run_ranks(1, shared_memory, opts, tmp_path / "none")[0]
    assert (every - shared, learns) == (every - shared, every - shared)
    ((wanted,),) = run_ranks(1, train, [opts], tmp_path / "none", 3)
    assert wanted[2]["train/critic-value_loss"] < wanted[0]["train/critic-value_loss"]
    n, layout = LAYOUTS["tp2 sp"]
    found = run_ranks(n, train, [options(models["dense"], n, **fields, **layout)], tmp_path / "none", 3)
    for ours, theirs in zip(found[0][0], wanted, strict=True):
        same(ours, theirs, 2e-4)
    losses, kept = run_ranks(1, save_between, opts, tmp_path / "run")[0]
    assert kept
    assert run_ranks(1, resume, opts, tmp_path / "run")[0] == losses[3:]


def test_activations_that_are_computed_again(models: dict[str, Path], tmp_path: Path) -> None:
    """With what dropout leaves out, and in the first layer, whose input has no gradient of its own."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    kept, computed = (
        run_ranks(1, train, [options(models["dense"], lora_dropout=0.2, megatron=megatron)], tmp_path, 3)[0][0]
        for megatron in ({}, again)
    )
    assert [row["train/grad_norm"] for row in kept] == [row["train/grad_norm"] for row in computed]


def dropped(opts: Options, directory: Path) -> tuple[list[float], list[float]]:
    """Log-probs of two passes without gradients, and losses of two steps with."""
    policy, others, _ = begun(opts, directory)
    from hpcrl.trainer.step import packing, passes

    mine = ShareExchange(policy.ranks).exchange(shares(opts, batch().select(range(8)))[policy.ranks.dp_rank])
    trained(policy, others, opts, 1)
    rows = [packing.pack(mine.batch, mine.micro_batches[0][0], policy.ranks, policy.config.sequence_parallel)]
    passed = [float(torch.cat(passes.logprobs(policy, opts, rows)).sum()) for _ in range(2)]
    return passed, [m["train/grad_norm"] for m in trained(policy, others, opts, 2)]


def test_dropout_is_of_training_alone(models: dict[str, Path], tmp_path: Path) -> None:
    n, fields = LAYOUTS["tp2 sp"]
    opts = options(models["dense"], n, lora_dropout=0.5, lr=0.0, **fields)
    passed, norms = run_ranks(n, dropped, opts, tmp_path)[0]
    assert passed[0] == passed[1]
    assert norms[0] != norms[1]
