"""Routing replay: the experts that were chosen before are the ones that are trained, whatever the layout and the
packing.

The reference is transformers whose routers are told the choice of each token, one sample at a time: a choice that lands
one token, layer or rank off has another gradient.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.trainer.rollout_calls import ShareExchange
from hpcrl.transport.share_format import SampleBatch
from tests.support.families import apart, make
from tests.support.ranks import run_ranks
from tests.trainer.step import test_invariance as whole
from tests.trainer.step.test_invariance import PACKINGS, RECOMPUTE, equal, gradients

pytestmark = pytest.mark.process

FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
EXPERTS = {
    "qwen3_moe": (6, 3, (0, 2, 3)),
    "glm4_moe": (12, 4, (1, 2, 3)),
    "deepseek_v3": (12, 4, (1, 2, 3)),
    "glm4_moe_lite": (6, 3, (1, 2, 3)),
    "minimax_m2": (6, 3, (0, 1, 2, 3)),
    "qwen3_next": (8, 3, (0, 2, 3)),
    "qwen3_5_moe_text": (8, 3, (0, 1, 2, 3)),
}  # experts, chosen of them, layers that have them
R3 = whole.LOSSES["grpo"] | {"use_rollout_routing_replay": True}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank, softmax": ("qwen3_moe", 1, {"megatron": RECOMPUTE["uniform"]}),
    "one rank, sigmoid and bias": ("glm4_moe", 1, {}),
    "one rank, latent attention": ("deepseek_v3", 1, {}),
    "tp2 sp ep2": (
        "glm4_moe",
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "pp2 vpp2": (
        "qwen3_moe",
        2,
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "megatron": RECOMPUTE["block"]},
    ),
    "pp2, experts recomputed": ("glm4_moe", 2, {"pipeline_model_parallel_size": 2, "megatron": MOE}),
    "cp2": ("qwen3_moe", 2, {"context_parallel_size": 2}),
    "cp2, latent attention": ("deepseek_v3", 2, {"context_parallel_size": 2}),
    "ep2, experts recomputed": ("qwen3_moe", 2, {"expert_model_parallel_size": 2, "megatron": MOE}),
    "tp2 sp cp2": (
        "glm4_moe",
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four layers of each family, of which one is dense."""
    return {name: make(tmp_path_factory.mktemp(name), name, odd=True, num_hidden_layers=4) for name in FAMILIES}


@cache
def random_choices(name: str) -> np.ndarray:
    """For each token of the fixed batch experts at random, far from what the router would say; none for the last of a
    sample."""
    experts, chosen, layers = EXPERTS[name]
    data = whole.batch()
    order = np.random.default_rng(5).random((len(data.tokens), len(layers), experts)).argsort(-1)
    order[data.token_offsets[1:] - 1] = 0
    return order[..., :chosen].astype(np.uint8)


def data_of(name: str, choices: np.ndarray | None = None) -> SampleBatch:
    return replace(
        whole.batch(), extra={"rollout_routed_experts": random_choices(name) if choices is None else choices}
    )


# ---- the reference


class Told:
    """A model of transformers whose routers are told the experts of each token; to be called once a sample, in
    order."""

    def __init__(self, model: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM

        self._data = data_of(name)
        self._sample = 0
        eager = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        self._hf = AutoModelForCausalLM.from_pretrained(model, **eager)
        self.named_parameters = self._hf.named_parameters
        for place, layer in enumerate(EXPERTS[name][2]):
            gate = self._hf.model.layers[layer].mlp.gate
            gate.register_forward_hook(lambda gate, args, out, place=place: self._route(gate, args[0], out, place))

    def __call__(self, ids: torch.Tensor) -> Any:
        found = self._hf(ids)
        self._sample += 1
        return found

    def _route(self, gate: Any, hidden: torch.Tensor, output: Any, place: int) -> tuple[torch.Tensor, ...]:
        begin, end = self._data.token_offsets[self._sample : self._sample + 2]
        told = torch.from_numpy(self._data.extra["rollout_routed_experts"][begin : end - 1, place].astype(np.int64))
        experts = torch.cat([told, output[2][-1:]])  # the last token is read by nobody: its own choice
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]).float(), gate.weight.float())
        if hasattr(gate, "e_score_correction_bias"):  # the bias takes part in the choice alone
            weights = logits.sigmoid().gather(1, experts)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
        else:
            weights = logits.softmax(-1).gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights
        return output[0], weights, experts


_EXPECTED: dict[str, dict[str, torch.Tensor]] = {}


def expected(models: dict[str, Path], name: str) -> dict[str, torch.Tensor]:
    """Gradients under the names of files."""
    if name not in _EXPECTED:
        opts = whole.options(models[name], **R3)
        _EXPECTED[name] = whole.expected(Told(models[name], name), opts, "grpo").gradients
    return _EXPECTED[name]


# ---- R3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_given_experts_are_trained(models: dict[str, Path], layout: str) -> None:
    name, n, fields = LAYOUTS[layout]
    found = gradients(models[name], n, fields | R3, data_of(name))
    found = {
        key: gradient for key, gradient in found.items() if not key.endswith("e_score_correction_bias")
    }  # a buffer
    equal(found, apart(expected(models, name), found))


def test_shifted_choice_changes_gradient(models: dict[str, Path]) -> None:
    """So is one that is not replayed: what the test above compares depends on it."""
    wanted = expected(models, "qwen3_moe")
    shifted = np.roll(random_choices("qwen3_moe"), 1, 0)
    gate = "model.layers.0.mlp.gate.weight"
    for fields, choices in ((R3, shifted), (whole.LOSSES["grpo"], None)):
        found = gradients(models["qwen3_moe"], 1, fields, data_of("qwen3_moe", choices))[gate]
        assert (found - wanted[gate]).norm() > 0.1 * wanted[gate].norm()


# ---- R2


def replayed_on_rank(every: list[Options], name: str) -> list[dict[str, float]]:
    """Metrics of two optimizer steps a rollout, from the same weights for each of the options; with R3 the samples
    bring what the routers choose under these weights."""
    from hpcrl.models.routing import Routing
    from hpcrl.trainer.step import packing, passes, train_batch

    found, ranks = [], None
    for opts in every:
        policy = whole.start(opts, ranks)
        ranks, data = policy.ranks, whole.batch()
        if opts.use_rollout_routing_replay:
            routing = Routing.of_fields(vars(policy.config))
            alone = [packing.pack(data, [i], ranks, False) for i in range(len(data))]
            passes.logprobs(policy, opts, alone, "record")
            every_layer = torch.cat([p.choices.table(range(len(routing.layers))) for p in alone], 1)
            data = data_of(name, routing.column(every_layer.transpose(0, 1).numpy()))
        mine = ShareExchange(ranks).exchange(whole.shares(opts, data)[ranks.dp_rank])
        found.append(train_batch.train(policy, ranks, opts, mine))
    return found


def test_what_the_old_pass_chose_is_trained(models: dict[str, Path]) -> None:
    """The second step, from other weights, has the experts of the first weights: as if the samples had brought
    those."""
    common = {"num_steps_per_rollout": 2, "lr": 3e-2, "adam_eps": 1e-4, "max_logprob_diff": 100.0}
    r2 = {"use_routing_replay": True}
    r3 = {"use_rollout_routing_replay": True}
    names = [f"train/{name}" for name in ("loss", "ppo_kl", "pg_clipfrac", "grad_norm", "routing_changed")]

    def run(n: int, *each: dict[str, Any]) -> list[dict[str, float]]:
        every = [whole.options(models["glm4_moe"], n, **PACKINGS["64 tokens"], **common, **fields) for fields in each]
        return whole.same_everywhere(run_ranks(n, replayed_on_rank, every, "glm4_moe"))

    plain, recorded, given = run(1, {}, r2, r3)
    assert recorded["train/routing_changed"] > 0.02  # of the second step: the routers would have chosen otherwise
    assert recorded["train/ppo_kl"] != pytest.approx(plain["train/ppo_kl"], rel=1e-3)
    for name in names:
        assert recorded[name] == pytest.approx(given[name], rel=1e-6), name
    layout = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "megatron": RECOMPUTE["uniform"],
    }
    (spread,) = run(4, r2 | layout)
    for name in names[:4]:
        assert spread[name] == pytest.approx(recorded[name], rel=1e-4, abs=1e-6), name


# ---- what is refused


def refusal_on_rank(opts: Options, column: np.ndarray | None) -> str:
    from hpcrl.errors import HpcrlError
    from hpcrl.trainer.step import train_batch

    data = whole.batch() if column is None else replace(whole.batch(), extra={"rollout_routed_experts": column})
    try:
        policy = whole.start(opts)
        train_batch.train(policy, policy.ranks, opts, whole.shares(opts, data)[0])
    except HpcrlError as error:
        return str(error)
    return "no error"


def test_choices_that_are_not_of_this_model(models: dict[str, Path]) -> None:
    opts = whole.options(models["qwen3_moe"], **R3)
    good = random_choices("qwen3_moe")
    for column, said in (
        (None, "samples do not say"),
        (good[:, :2], "the samples have 2 layers of 3 bytes of routed experts"),
        (good + np.uint8(1), "the samples name expert 6, the model has 6 in a layer"),
    ):
        assert said in run_ranks(1, refusal_on_rank, opts, column)[0]


def test_megatrons_own_settings_and_dense_models(models: dict[str, Path], tmp_path: Path) -> None:
    dense = whole.options(make(tmp_path, "qwen3"), **R3)
    (said,) = run_ranks(1, refusal_on_rank, dense, None)
    assert re.match("--use-rollout-routing-replay replays the choice.*qwen3 model in.*has none; leave", said)
    for fields, why in (
        (
            {"moe_enable_routing_replay": True},
            "--moe-enable-routing-replay cannot be set: give --use-routing-replay or",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "router replays no choice",
        ),
    ):
        assert why in run_ranks(1, refusal_on_rank, whole.options(models["qwen3_moe"], **R3, megatron=fields), None)[0]
