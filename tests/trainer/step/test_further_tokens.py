"""Layers that predict further tokens: their gradient is torch's, the policy does not notice them, nothing leaks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from hpcrl.trainer.step import packing
from tests.support.mtp_models import MAKERS
from tests.support.ranks import run_ranks
from tests.trainer.step.test_invariance import (
    SAMPLES,
    VOCAB,
    batch,
    failure_on_rank,
    gradients_on_rank,
    options,
    sample,
    shares,
    start,
)

pytestmark = pytest.mark.process

HEADS = {"mtp_num_layers": 1, "enable_mtp_training": True}
#: what a checkpoint calls the layer, its own four parts, and whether the hidden states come first
NAMES = {
    "mimo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), True),
    "glm4_moe": ("model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), False),
}
NAMES |= dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), NAMES["glm4_moe"])
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("mimo", 1, {"recompute_granularity": "full"}),
    "tp2 sp": ("mimo", 2, TP2),
    "pp2": ("mimo", 2, PP2),
    "dp2 cp2": ("mimo", 4, {"context_parallel_size": 2}),
    "experts": ("glm4_moe", 1, {}),
    "experts, ep2": ("glm4_moe", 2, {"expert_model_parallel_size": 2}),
    "latent": ("deepseek_v3", 1, {}),
    "latent, lite": ("glm4_moe_lite", 1, {}),
    "latent, tp2 sp": ("deepseek_v3", 2, TP2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name, vocab_size=VOCAB) for name, make in MAKERS.items()}


def chosen(models: dict[str, Path], layout: str, **more: Any) -> Options:
    name, n, values = LAYOUTS[layout]
    values = dict(values)
    if "recompute_granularity" in values:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        values = {"megatron": full}
    return options(models[name], n, use_rollout_logprobs=True, **(values | more))


# ---- on the ranks


def two_steps(every: list[Options]) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Metrics of two steps and all weights behind them, of each of the options in one layout."""
    from hpcrl.trainer.megatron import hf_weights
    from hpcrl.trainer.step import train_batch

    ranks, found = None, []
    for opts in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        mine = ShareExchange(ranks).exchange(shares(opts)[ranks.dp_rank])
        metrics = [train_batch.train(policy, ranks, opts, mine) for _ in range(2)]
        whole = {name: tensor.clone() for name, tensor in hf_weights.export(policy)}
        found.append((metrics[0], whole if ranks.rank == 0 else {}))
    return found


def resumed(opts: Options, directory: Path) -> bool:
    """Whether a step after a checkpoint gives the weights that it gives without a stop between them."""
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.megatron import hf_weights, model
    from hpcrl.trainer.step import train_batch

    def step(policy: Any) -> dict[str, torch.Tensor]:
        mine = ShareExchange(policy.ranks).exchange(shares(opts)[policy.ranks.dp_rank])
        train_batch.train(policy, policy.ranks, opts, mine)
        return {name: tensor.clone() for name, tensor in hf_weights.export(policy)}

    policy = start(opts)
    before = step(policy)
    save_load.save(policy, policy.ranks, directory, Position(1, 1, None), "run")
    wanted = step(policy)
    other = model.build(opts, policy.ranks)
    save_load.load_checkpoint(other, other.ranks, save_load.latest(directory), "run")
    found = step(other)
    if policy.ranks.rank:  # the tensors are rank 0's
        return True
    moved = any(not torch.equal(wanted[name], before[name]) for name in wanted if "mtp_layers" in name)
    return moved and all(torch.equal(wanted[name], found[name]) for name in wanted)


# ---- torch


def norm(weight: torch.Tensor, values: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)


@cache
def expected(name: str, model: Path, scale: float) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean cross entropy, gradient of each tensor of the layer), by transformers and autograd, a sample at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    head, own, hidden_first = NAMES[name]
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    kind = {"mimo": "qwen2"}.get(name, name)
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).float()
    single = {"num_hidden_layers": 1, "layer_types": None, "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    layer = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(fields | single))).float()
    from_files(base, tensors, "model.layers.", "model.layers.")
    from_files(layer, tensors, head, "model.layers.0.")
    if hidden_first:  # MiMo's takes them as they are before the last norm
        base.model.norm = torch.nn.Identity()
    mine = {part: tensors[f"{head}{part}.weight"].clone().requires_grad_() for part in own}
    layer.model.norm.weight = torch.nn.Parameter(mine[own[3]].detach().clone())
    epsilon = config["rms_norm_eps"]
    total, entropies = torch.zeros(()), []
    for i in range(SAMPLES):
        ids, mask, _ = sample(batch(), i)
        with torch.no_grad():
            states = base.model(ids[None]).last_hidden_state[0, :-2]
            following = tensors["model.embed_tokens.weight"][ids[1:-1]].clone()
        following[0] = 0.0
        parts = norm(mine[own[0]], following, epsilon), norm(mine[own[1]], states, epsilon)
        joined = torch.cat(parts[::-1] if hidden_first else parts, -1) @ mine[own[2]].T
        out = layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        logprobs = (out @ tensors["lm_head.weight"].T).log_softmax(-1)
        found = -logprobs.gather(1, ids[2:, None])[:, 0]
        kept = torch.zeros(len(ids))
        kept[len(ids) - len(mask) :] = torch.as_tensor(mask, dtype=torch.float32)
        total = total + scale * (found * kept[2:]).sum() / max(float(kept.sum()), 1.0) / SAMPLES
        entropies.append(found[kept[2:] > 0].detach())
    total.backward()
    gradients = {f"{head}{part}.weight": tensor.grad for part, tensor in mine.items() if part != own[3]}
    gradients[f"{head}{own[3]}.weight"] = layer.model.norm.weight.grad
    for parameter, tensor in layer.model.layers[0].named_parameters():
        if "experts." not in parameter or "shared" in parameter:
            gradients[f"{head}{parameter}"] = tensor.grad
    return float(torch.cat(entropies).mean()), {key: value for key, value in gradients.items() if value is not None}


def from_files(module: torch.nn.Module, tensors: dict[str, torch.Tensor], head: str, own: str) -> None:
    """Fill a model from a checkpoint whose layers are called otherwise; experts lie in one tensor in transformers."""
    moved = {own + key.removeprefix(head): value for key, value in tensors.items() if key.startswith(head)}
    moved = {key: value for key, value in tensors.items() if not key.startswith("model.layers.")} | moved
    state = module.state_dict()
    for key in state:
        if key in moved:
            state[key] = moved[key]
        elif key.endswith("experts.gate_up_proj"):
            prefix = key.removesuffix("gate_up_proj")
            count = len(state[key])
            both = [[moved[f"{prefix}{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(count)]
            state[key] = torch.stack([torch.cat(pair) for pair in both])
        elif key.endswith("experts.down_proj"):
            prefix = key.removesuffix("down_proj")
            state[key] = torch.stack([moved[f"{prefix}{e}.down_proj.weight"] for e in range(len(state[key]))])
    module.load_state_dict(state)


# ---- tests


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("experts", "latent, tp2 sp")])
def test_the_policy_does_not_notice_them(models: dict[str, Path], layout: str) -> None:
    """Bit for bit the same weights behind two clipped steps; and the loss is torch's, in every layout."""
    name, n, _ = LAYOUTS[layout]
    every = [chosen(models, layout, clip_grad=0.05, **more) for more in ({}, HEADS)]
    (alone, without), (metrics, weights) = run_ranks(n, two_steps, every)[0]
    assert metrics["train/grad_norm"] == alone["train/grad_norm"] > 0.05
    assert all(torch.equal(tensor, weights[key]) for key, tensor in without.items())
    files = load_file(models[name] / "model.safetensors")
    added = weights.keys() - without.keys()
    assert added and all(key.startswith(NAMES[name][0]) for key in added)
    assert all(
        not torch.equal(weights[key], files[key]) for key in added if key.endswith(("q_proj.weight", "norm.weight"))
    )
    assert metrics["train/mtp_loss"] == pytest.approx(expected(name, models[name], 0.2)[0], rel=1e-5)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "experts, ep2"])
def test_their_gradient_is_torchs(models: dict[str, Path], layout: str) -> None:
    name, n, _ = LAYOUTS[layout]
    more: dict[str, Any] = HEADS | {"mtp_loss_scaling_factor": 0.3}
    if "dp2" in layout:  # else each rank has but a part of the gradient
        more |= {"megatron": {"use_distributed_optimizer": False}}
    found = run_ranks(n, gradients_on_rank, chosen(models, layout, **more))[0]
    _, wanted = expected(name, models[name], 0.3)
    assert len(wanted) > 12
    for key, gradient in wanted.items():
        assert float((found[key] - gradient).abs().max()) < 1e-5 * max(1.0, float(gradient.abs().max())), key
        assert float(gradient.abs().max()) > 1e-5, key


def test_their_gradient_without_bound_is_named(models: dict[str, Path]) -> None:
    opts = chosen(models, "one rank", mtp_loss_scaling_factor=1e30, **HEADS)
    ((text, _),) = run_ranks(1, failure_on_rank, opts, shares(opts))
    assert text.startswith("rollout 0, optimizer step 0: mtp_grad_norm is inf") and "--enable-mtp-training" in text


def test_a_resumed_run_trains_them_as_before(models: dict[str, Path], tmp_path: Path) -> None:
    opts = chosen(models, "tp2 sp", clip_grad=0.05, weight_decay=0.1, **HEADS)
    assert all(run_ranks(2, resumed, opts, tmp_path / "saved"))


def seen(packed: packing.Packed, number: int) -> tuple[list[list[int]], list[int]]:
    """What the layers see of one of the samples: (row, label) in it, and what follows its rows."""
    further = packed.further
    assert further is not None
    begin, end = packed.ends[number], packed.ends[number + 1]
    own = further.sample == number
    rows = torch.stack([further.rows[own] - begin, further.labels[own]], 1)
    return rows.tolist(), further.tokens[begin:end].tolist()


def leaks(order: list[int]) -> bool:
    """Whether a sample that is packed with others is seen otherwise than by its own tokens."""
    ranks: Any = SimpleNamespace(cp_size=1, cp_rank=0, tp_size=1, tp_rank=0, device=torch.device("cpu"))
    packed = packing.pack(batch(), order, ranks, False, further=True)
    for number, which in enumerate(order):
        ids, mask, _ = sample(batch(), which)
        first = len(ids) - len(mask)
        labels = [first + at for at in np.flatnonzero(np.asarray(mask)) if first + at >= 2]
        wanted = [[at - 2, int(ids[at])] for at in labels], [*ids[1:].tolist(), 0]
        if seen(packed, number) != wanted:
            return True
    return False


def test_nothing_of_another_sequence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted leak, the token behind a sequence's last, is found."""
    assert not leaks(list(range(SAMPLES))) and not leaks([3])
    right = packing._further

    def leaking(tokens: np.ndarray, *rest: Any) -> Any:
        return np.roll(tokens, -1), *right(tokens, *rest)[1:]

    monkeypatch.setattr(packing, "_further", leaking)
    assert leaks(list(range(SAMPLES)))
