"""The loss depends on the batch alone: the same loss and gradient norm for every packing and every layout.

The reference is the same loss, advantages included, written down plainly for transformers and autograd, a sample at a
time.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.rollout.batch_assembly import shares_of
from hpcrl.sample import Sample
from hpcrl.trainer.rollout_calls import ShareExchange
from hpcrl.transport.share_format import SampleBatch, Share
from hpcrl.utils.sample_parts import COMPLETED
from tests.support.families import make
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model

pytestmark = pytest.mark.process

VOCAB = 131  # odd, so that TP 2 pads it
SAMPLES = 16
LONG = 90  # tokens of the longest sample: more than any limit below
PROMPTS = 4

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2 sp cp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}),
    "dp2 cp2": (4, {"context_parallel_size": 2}),
    "dp2 pp2": (4, {"pipeline_model_parallel_size": 2}),
    "dp4": (4, {}),
}
DEEP: dict[str, tuple[int, dict[str, Any]]] = {  # of the deep model
    "pp2 uneven": (2, {"pipeline_model_parallel_size": 2, "megatron": {"num_layers_in_first_pipeline_stage": 4}}),
    "tp2 sp pp2 vpp3": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,  # three stages on each pipeline rank
        },
    ),
    "pp2 vpp2 uneven": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "megatron": {"num_layers_in_last_pipeline_stage": 2},
        },
    ),
}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform": FULL | {"recompute_method": "uniform"},
    "block": FULL | {"recompute_method": "block"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
PACKINGS: dict[str, dict[str, Any]] = {
    "one sample each": {"micro_batch_size": 1},
    "three each": {"micro_batch_size": 3},
    "40 tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40},
    "64 tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "all in one": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100_000},
}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {
        "use_rollout_logprobs": True,
        "eps_clip": 0.1,
        "eps_clip_high": 0.15,
        "entropy_coef": 0.01,
        "rollout_temperature": 0.8,
    },
    "per token": {
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": True,
        "eps_clip_c": 1.05,
        "entropy_coef": 0.01,
        "log_probs_chunk_size": 7,
    },
    "own old": {"log_probs_chunk_size": 13},
    "sft": {"loss_type": "sft_loss"},
}
#: of the same step: estimators, losses, corrections and terms that look at whole responses, groups or the whole batch
ALGORITHMS: dict[str, dict[str, Any]] = {
    "kl loss": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "low_var_kl",
        "use_unbiased_kl": True,
        "use_rollout_logprobs": True,
        "rollout_temperature": 0.8,
    },
    "gspo": {"advantage_estimator": "gspo", "use_rollout_logprobs": True, "eps_clip": 0.1, "eps_clip_high": 0.2},
    "cispo": {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "eps_clip": 1.0, "eps_clip_high": 0.5},
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "gamma": 0.9,
        "kl_coef": 0.1,
        "kl_loss_type": "k2",
        "use_tis": True,
        "tis_clip": 1.2,
        "calculate_per_token_loss": True,
    },
    "rloo": {
        "advantage_estimator": "rloo",
        "use_tis": True,
        "custom_tis_function_path": "mis",
        "tis_level": "geometric",
        "tis_clip": 1.3,
        "log_probs_chunk_size": 9,
    },
    "opo": {"advantage_estimator": "opo", "pg_loss_divisor": 20, "entropy_coef": 0.02},
}
#: losses and terms of single tokens, or of whole responses as gspo's is: in a few layouts and packings
FURTHER: dict[str, dict[str, Any]] = {
    "gmpo": {"pg_loss_type": "gmpo", "use_rollout_logprobs": True, "eps_clip": 0.3, "eps_clip_high": 0.4},
    "sapo": {"pg_loss_type": "sapo", "use_rollout_logprobs": True, "sapo_tau_pos": 0.8, "sapo_tau_neg": 1.3},
    "distill sampled": {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.3, "rollout_temperature": 0.8},
    "distill reverse": {
        "advantage_estimator": "none",
        "use_opd": True,
        "opd_type": "megatron",
        "opd_kl_type": "reverse",
        "rollout_temperature": 0.8,
        "log_probs_chunk_size": 7,
    },
    "distill forward": {
        "use_opd": True,
        "opd_type": "megatron",
        "opd_kl_type": "forward",
        "opd_kl_coef": 0.4,
        "calculate_per_token_loss": True,
    },
}
EVERY = LOSSES | ALGORITHMS
#: four losses of a layout, each loss in two layouts; `make soak` takes all losses in all layouts
FEW = {
    "tp2 sp": ("grpo", "kl loss", "reinforce++", "rloo"),
    "pp2": ("per token", "gspo", "reinforce++", "opo"),
    "dp2 cp2": ("own old", "gspo", "cispo", "rloo"),
    "tp2 pp2": ("grpo", "sft", "kl loss", "cispo"),
    "dp4": ("per token", "own old", "sft", "opo"),
}
WITH_REFERENCE = ("kl loss", "reinforce++")
WITH_TEACHER = ("distill sampled", "distill reverse", "distill forward")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model: the same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), tied=True, vocab_size=VOCAB, seed=1)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers: enough for virtual stages, and for uneven ones."""
    return make_model(tmp_path_factory.mktemp("deep"), tied=False, vocab_size=VOCAB, num_hidden_layers=6)


def options(model: Path, n: int = 1, **values: Any) -> Options:
    values = {"lr": 1e-3, "clip_grad": 0.0, "max_logprob_diff": 100.0} | values
    return Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=n, **values)


@cache
def batch() -> SampleBatch:
    """One fixed batch: lengths from 5 to LONG, masks with holes, one sample that is masked altogether."""
    rng = np.random.default_rng(3)
    samples = []
    for number in range(SAMPLES):
        length = LONG if number == 5 else int(rng.integers(5, 40))
        response = int(rng.integers(2, length - 1))
        mask = (rng.random(response) < 0.9).astype(np.uint8) if number != 7 else np.zeros(response, np.uint8)
        samples.append(
            Sample(
                group_index=number // 4,
                response_index=number % 4,
                tokens=rng.integers(1, VOCAB, length).astype(np.int32),
                response_length=response,
                loss_mask=mask,
                rollout_log_probs=rng.normal(-5, 0.7, response).astype(np.float32),
                versions=np.zeros(response, np.int32),
                reward=float(rng.normal()),
                status=COMPLETED,
            )
        )
    return SampleBatch.from_samples(samples)


def shares(opts: Options, data: SampleBatch | None = None) -> list[Share]:
    """The batch as shares of the data-parallel ranks, as the rollout process makes them."""
    return shares_of(batch() if data is None else data, opts, 0, 0, {})


# ---- on the ranks


def start(opts: Options, ranks: Any = None) -> Any:
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import hf_weights, model

    policy = model.build(opts, ranks or parallel_state.initialize(opts))
    hf_weights.load_hf(policy, opts.hf_checkpoint)
    return policy


def others_of(policy: Any, opts: Options) -> Any:
    """The models beside the trained one."""
    from hpcrl.trainer.reference_and_critic import ReferenceAndCritic

    return ReferenceAndCritic(policy, policy.ranks, opts, None).of_share(0, 0)


def train_on_rank(every: list[Options], data: SampleBatch | None = None) -> list[dict[str, float]]:
    """Metrics of training on the batch twice ("second/..."), from the same weights for each of the options, in one
    layout."""
    from hpcrl.trainer.step import train_batch

    found, ranks = [], None
    for opts in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        mine = ShareExchange(ranks).exchange(shares(opts, data)[ranks.dp_rank])
        assert mine is not None
        others = others_of(policy, opts)
        first, second = (train_batch.train(policy, ranks, opts, mine, others) for _ in range(2))
        found.append(first | {"second/" + name: value for name, value in second.items()})
    return found


def gradients_on_rank(opts: Options, data: SampleBatch | None = None) -> dict[str, torch.Tensor]:
    """What the optimizer was about to see, under Hugging Face names, on rank 0."""
    from hpcrl.trainer.megatron import hf_weights
    from hpcrl.trainer.step import train_batch

    policy, found = start(opts), []
    mine = ShareExchange(policy.ranks).exchange(shares(opts, data)[policy.ranks.dp_rank])
    parameters = [p for module in policy.modules for p in module.parameters()]

    def instead_of_a_step() -> bool:
        found.extend(p.main_grad.clone() for p in parameters)
        return True

    policy.optimizer.step_with_ready_grads = instead_of_a_step
    train_batch.train(policy, policy.ranks, opts, mine, others_of(policy, opts))
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.data = gradient
    whole = {name: tensor.clone() for name, tensor in hf_weights.export(policy)}
    return whole if policy.ranks.rank == 0 else {}


def failure_on_rank(opts: Options, own: list[Share], poison: bool = False) -> tuple[str, bool]:
    """(the error, whether the weights are what they were) of training on shares that cannot be trained on."""
    from hpcrl.errors import HpcrlError
    from hpcrl.trainer.step import train_batch

    policy = start(opts)
    if poison:
        next(policy.module.parameters()).data[5] = float("nan")
    before = [p.detach().clone() for p in policy.module.parameters()]
    try:
        train_batch.train(policy, policy.ranks, opts, ShareExchange(policy.ranks).exchange(own[policy.ranks.dp_rank]))
    except HpcrlError as error:
        same = all(
            torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(policy.module.parameters(), before, strict=True)
        )
        return str(error), same
    return "no error", False


# ---- the reference


@dataclass(frozen=True)
class Expected:
    """What a step must say: its loss, the gradient's norm, other metrics, and the gradient by Hugging Face name."""

    loss: float
    norm: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


@cache
def reference(model: Path, loss: str, other: Path | None = None) -> Expected:
    """By transformers and autograd, a sample at a time; other: the reference model, or the teacher."""
    return expected(transformers_model(model), options(model, **(EVERY | FURTHER)[loss]), loss, other)


def expected(hf: Any, opts: Options, loss: str, other: Path | None = None) -> Expected:
    """The same for a model at hand, which is called once for each sample, in order."""
    data = batch()
    rows = [sample(data, i) for i in range(SAMPLES)]
    found = [logprobs_and_entropy(hf, row[0], len(row[1]), opts) for row in rows]
    apart: list[Any] = [None] * SAMPLES
    if other is not None:
        with torch.no_grad():
            apart = [logprobs_and_entropy(transformers_model(other), row[0], len(row[1]), opts)[0] for row in rows]
    own = [logprobs.detach() for logprobs, _ in found]
    advantages = expected_advantages(opts, data, [mask for _, mask, _ in rows], own, apart)
    if opts.use_opd and opts.opd_kl_type == "sampled":
        advantages = [a - opts.opd_kl_coef * (p - q) for a, p, q in zip(advantages, own, apart, strict=True)]
        apart = [None] * SAMPLES
    total = torch.zeros(())
    kl = 0.0
    difference = 0.0
    if opts.use_opd and opts.opd_kl_type != "sampled":
        for ids, mask, _ in rows:
            with torch.no_grad():
                theirs = distributions(transformers_model(other), ids, len(mask), opts)
            ours = distributions(hf, ids, len(mask), opts)
            p, q = (ours, theirs) if opts.opd_kl_type == "reverse" else (theirs, ours)
            values = (p.exp() * (p - q)).sum(-1)
            each = 1.0 if opts.calculate_per_token_loss else 1.0 / max(float(mask.sum()), 1.0)
            total = total + opts.opd_kl_coef * (values * mask).sum() * each
            kl += float((values.detach() * mask).sum()) * each
    for (logprobs, entropy), (_, mask, engine), old, ref, advantage in zip(
        found, rows, own, apart, advantages, strict=True
    ):
        old = engine if opts.use_rollout_logprobs else old
        terms = _terms(logprobs, old, mask, advantage, opts) * _correction(old - engine, mask, opts)
        each = 1.0 if opts.calculate_per_token_loss else 1.0 / max(float(mask.sum()), 1.0)
        total = total + (terms * mask).sum() * (1 / opts.pg_loss_divisor if opts.pg_loss_divisor else each)
        total = total - opts.entropy_coef * (entropy * mask).sum() * each
        if opts.use_kl_loss:
            d = logprobs - ref
            values = ((logprobs - old).exp() * ((-d).exp() - 1 + d)).clamp(-10, 10)  # --use-unbiased-kl of low_var_kl
            total = total + opts.kl_loss_coef * (values * mask).sum() * each
            kl += float((values.detach() * mask).sum()) * each
        difference += float(((logprobs.detach() - engine).abs() * mask).sum())
    count = float(data.loss_mask.sum()) if opts.calculate_per_token_loss else SAMPLES
    (total / count).backward()
    gradients = {name: p.grad for name, p in hf.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    metrics = {"train_rollout_logprob_abs_diff": difference / float(data.loss_mask.sum())} if loss != "sft" else {}
    metrics |= {"kl_loss": kl / count} if opts.use_kl_loss else {}
    metrics |= {f"opd_{opts.opd_kl_type}_kl": kl / count} if kl and opts.use_opd else {}
    return Expected(float(total.detach() / count), float(norm), metrics, gradients)


def logprobs_and_entropy(hf: Any, ids: torch.Tensor, response: int, opts: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a response's tokens [response] each."""
    every = distributions(hf, ids, response, opts)
    return every.gather(1, ids[-response:, None])[:, 0], -(every.exp() * every).sum(-1)


def distributions(hf: Any, ids: torch.Tensor, response: int, opts: Options) -> torch.Tensor:
    """Log-probs of the whole vocabulary for each of a response's tokens, [response, vocabulary]."""
    return (hf(ids[None]).logits[0, -response - 1 : -1] / opts.rollout_temperature).log_softmax(-1)


def expected_advantages(
    opts: Options, data: SampleBatch, masks: list[torch.Tensor], own: list[torch.Tensor], apart: list[Any]
) -> list[torch.Tensor]:
    """Of each sample [response], from the rewards of groups of four."""
    rewards = torch.tensor(data.rows["reward"].copy()).view(-1, 4)
    lengths = torch.tensor(data.rows["response_length"].copy()).double().view(-1, 4)
    if opts.advantage_estimator == "none":
        return [torch.zeros_like(mask) for mask in masks]
    if opts.advantage_estimator == "reinforce_plus_plus":
        return _returns(opts, rewards.flatten().tolist(), masks, own, apart)
    if opts.advantage_estimator == "rloo":
        found = rewards - (rewards.sum(1, keepdim=True) - rewards) / 3
    elif opts.advantage_estimator == "opo":
        found = rewards - (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    else:
        found = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return [torch.full_like(mask, value) for mask, value in zip(masks, found.flatten().tolist(), strict=True)]


def _returns(
    opts: Options, rewards: list[float], masks: list[torch.Tensor], own: list[torch.Tensor], apart: list[Any]
) -> list[torch.Tensor]:
    """Discounted returns over trained tokens, with k2 of the KL as a penalty of each, whitened over the batch."""
    found = []
    for reward, mask, old, ref in zip(rewards, masks, own, apart, strict=True):
        values = torch.zeros(len(mask), dtype=torch.float64)
        following = 0.0
        last = int(mask.nonzero().max()) if mask.any() else -1
        for t in reversed(range(len(mask))):
            if mask[t]:
                penalty = opts.kl_coef * float(old[t] - ref[t]) ** 2 / 2
                following = (reward if t == last else 0.0) - penalty + opts.gamma * following
                values[t] = following
        found.append(values)
    every = torch.cat([values[mask > 0] for values, mask in zip(found, masks, strict=True)])
    return [
        ((values - every.mean()) / (every.var() + 1e-8).sqrt()).float() * mask
        for values, mask in zip(found, masks, strict=True)
    ]


def transformers_model(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def sample(data: SampleBatch, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [length], loss mask and log-probs [response] of one sample."""
    tokens, responses = (slice(*at[i : i + 2]) for at in (data.token_offsets, data.response_offsets))
    ids = torch.from_numpy(data.tokens[tokens].astype(np.int64))
    return (
        ids,
        torch.from_numpy(data.loss_mask[responses].astype(np.float32)),
        torch.from_numpy(data.rollout_log_probs[responses]),
    )


def _terms(
    own: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor, opts: Options
) -> torch.Tensor:
    """The policy's loss of each token of a response, before it is corrected and weighted."""
    if opts.loss_type == "sft_loss":
        return -own
    high = opts.eps_clip if opts.eps_clip_high is None else opts.eps_clip_high
    ratio = (own - old).exp()
    if opts.advantage_estimator == "cispo":
        return -ratio.detach().clamp(1 - opts.eps_clip, 1 + high) * advantage * own
    if opts.pg_loss_type == "sapo":
        tau = torch.where(advantage > 0, opts.sapo_tau_pos, opts.sapo_tau_neg)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    if opts.pg_loss_type == "gmpo":
        d = torch.where(advantage > 0, (own - old).clamp(max=high), (own - old).clamp(min=-opts.eps_clip))
        return -advantage * ((d * mask).sum() / mask.sum().clamp(min=1)).exp()
    if opts.advantage_estimator == "gspo":
        ratio = (((own - old) * mask).sum() / mask.sum().clamp(min=1)).exp()
    loss = torch.max(-ratio * advantage, -ratio.clamp(1 - opts.eps_clip, 1 + high) * advantage)
    if opts.eps_clip_c:
        loss = torch.where(advantage < 0, torch.min(loss, -opts.eps_clip_c * advantage), loss)
    return loss


def _correction(log_ratio: torch.Tensor, mask: torch.Tensor, opts: Options) -> torch.Tensor:
    """TIS' weight of each token, or mis' one of the whole response; log_ratio: of trainer to engine."""
    if not opts.use_tis:
        return torch.ones_like(log_ratio)
    if opts.custom_tis_function_path == "mis":
        log_ratio = ((log_ratio * mask).sum() / mask.sum().clamp(min=1)).expand(len(mask))
    return log_ratio.exp().clamp(max=opts.tis_clip)


# ---- the loss depends on the batch alone


RATES = ("perf/train_tokens_per_sec", "perf/train_tokens_per_sec_per_gpu", "perf/mfu")


def same_everywhere(found: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The metrics, which must be equal on every rank but for the time, and for what is divided by it."""
    rows = [
        [{k: v for k, v in row.items() if "time" not in k and not k.endswith(RATES)} for row in rank] for rank in found
    ]
    assert all(row == rows[0] for row in rows)
    return rows[0]


def agree(found: dict[str, float], wanted: Expected) -> None:
    assert found["train/loss"] == pytest.approx(wanted.loss, rel=1e-5, abs=1e-7)
    assert found["train/grad_norm"] == pytest.approx(wanted.norm, rel=1e-5)
    for name, value in wanted.metrics.items():
        assert found[f"train/{name}"] == pytest.approx(value, rel=1e-5), name


def fields_of(loss: str, other: Path) -> dict[str, Any]:
    """The options of a loss, with the reference model where it needs one."""
    return EVERY[loss] | ({"ref_load": str(other)} if loss in WITH_REFERENCE else {})


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_does_not_matter(model: Path, other: Path, packing: str) -> None:
    every = [options(model, **PACKINGS[packing], **fields_of(loss, other)) for loss in EVERY]
    for loss, found in zip(EVERY, same_everywhere(run_ranks(1, train_on_rank, every)), strict=True):
        agree(found, reference(model, loss, other if loss in WITH_REFERENCE else None))


@pytest.mark.parametrize(
    ("layout", "losses"),
    [*FEW.items(), *(pytest.param(x, tuple(EVERY), marks=pytest.mark.soak) for x in LAYOUTS)],
    ids=[*FEW, *(f"{x}, all losses" for x in LAYOUTS)],
)
def test_layout_does_not_matter(model: Path, other: Path, layout: str, losses: tuple[str, ...]) -> None:
    """Neither for the first step nor for the one after it: so the optimizer saw the same gradient, not one of the same
    norm."""
    n, fields = LAYOUTS[layout]
    packings = dict(zip(LOSSES, ("64 tokens", "one sample each", "64 tokens", "three each"), strict=True))
    every = [
        options(model, n, **PACKINGS[packings.get(loss, "40 tokens")], **fields, **fields_of(loss, other))
        for loss in losses
    ]
    for loss, found in zip(losses, same_everywhere(run_ranks(n, train_on_rank, every)), strict=True):
        agree(found, reference(model, loss, other if loss in WITH_REFERENCE else None))
        one = on_one_rank(model, loss, other)
        for name in ("second/train/loss", "second/train/grad_norm"):
            assert found[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), (loss, name)
        assert found["second/train/grad_norm"] != pytest.approx(found["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", ["one rank", "tp2", "tp2 pp2", "dp2 cp2"])
def test_neither_do_they_to_further_losses(model: Path, other: Path, layout: str) -> None:
    n, fields = LAYOUTS.get(layout, (1, {}))
    packing = PACKINGS["three each" if n == 1 else "64 tokens"]
    teacher = {loss: {"opd_teacher_load": str(other)} for loss in WITH_TEACHER}
    every = [
        options(model, n, **packing, **fields, **values, **teacher.get(loss, {})) for loss, values in FURTHER.items()
    ]
    for loss, found in zip(FURTHER, same_everywhere(run_ranks(n, train_on_rank, every)), strict=True):
        agree(found, reference(model, loss, other if loss in WITH_TEACHER else None))


def pairs() -> SampleBatch:
    """The batch in groups of two."""
    data, numbers = deepcopy(batch()), np.arange(SAMPLES)
    data.rows["group_index"], data.rows["response_index"] = numbers // 2, numbers % 2
    return data


@cache
def expected_of_pairs(model: Path, other: Path, beta: float) -> tuple[float, float]:
    """DPO's loss and the norm of its gradient; a response without trained tokens does not count itself."""
    opts = options(model)
    data = pairs()
    hf = transformers_model(model)
    frozen = transformers_model(other)
    ratios, masks = [], []
    for i in range(SAMPLES):
        ids, mask, _ = sample(data, i)
        with torch.no_grad():
            wanted = logprobs_and_entropy(frozen, ids, len(mask), opts)[0]
        ratios.append(((logprobs_and_entropy(hf, ids, len(mask), opts)[0] - wanted) * mask).sum())
        masks.append(mask)
    total, rewards = torch.zeros(()), data.rows["reward"]
    for i in range(SAMPLES):
        margin = beta * (ratios[i] - ratios[i ^ 1]) * (1 if rewards[i] > rewards[i ^ 1] else -1)
        total = total - torch.nn.functional.logsigmoid(margin) * float(masks[i].any()) / SAMPLES
    total.backward()
    return float(total.detach()), float(torch.stack([p.grad.norm() for p in hf.parameters()]).norm())


@pytest.mark.parametrize("layout", ["one rank", "tp2 pp2", "dp2 cp2"])
def test_neither_do_they_to_pairs(model: Path, other: Path, layout: str) -> None:
    n, fields = LAYOUTS.get(layout, (1, {}))
    dpo = {"loss_type": "dpo_loss", "n_samples_per_prompt": 2, "dpo_beta": 0.3, "ref_load": str(other)}
    opts = options(model, n, **PACKINGS["64 tokens"], **fields, **dpo)
    loss, norm = expected_of_pairs(model, other, 0.3)
    (found,) = same_everywhere(run_ranks(n, train_on_rank, [opts], pairs()))
    assert found["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert found["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


@cache
def on_one_rank(model: Path, loss: str, other: Path) -> dict[str, float]:
    return run_ranks(1, train_on_rank, [options(model, **PACKINGS["64 tokens"], **fields_of(loss, other))])[0][0]


@pytest.mark.parametrize(
    ("layout", "loss"),
    [("one rank", "grpo"), ("one rank", "per token"), ("dp2 cp2", "per token"), *((x, "grpo") for x in LAYOUTS)],
)
def test_every_gradient_is_that_of_transformers(model: Path, layout: str, loss: str) -> None:
    n, fields = LAYOUTS.get(layout, (1, {}))
    equal(gradients(model, n, fields | LOSSES[loss]), reference(model, loss).gradients)


@pytest.mark.parametrize(
    ("layout", "how"),
    [("one rank", "uniform"), ("one rank", "selective"), ("tp2 sp", "uniform"), ("pp2", "block")],
)
def test_recomputing_does_not_matter(model: Path, layout: str, how: str) -> None:
    n, fields = LAYOUTS.get(layout, (1, {}))
    found = gradients(
        model, n, fields | LOSSES["grpo"] | {"megatron": {**fields.get("megatron", {}), **RECOMPUTE[how]}}
    )
    equal(found, reference(model, "grpo").gradients)


@pytest.mark.parametrize("layout", DEEP)
def test_pipeline_stages_do_not_matter(deep: Path, layout: str) -> None:
    """Uneven and virtual pipeline stages do not matter."""
    n, fields = DEEP[layout]
    more = {**fields.get("megatron", {}), **(RECOMPUTE["block"] if "uneven" in layout else {})}
    equal(gradients(deep, n, fields | LOSSES["grpo"] | {"megatron": more}), gradients(deep, 1, LOSSES["grpo"]))


@pytest.mark.parametrize("layout", ["one rank", "dp2"])
def test_a_response_of_two_alike_samples_counts_as_one(model: Path, other: Path, layout: str) -> None:
    """Samples twice in their responses, so that 19 are filled up to 20 for two ranks: the same advantages, loss and
    gradient."""
    data = batch()
    twice = data.select(sorted([*range(SAMPLES), 0, 5, 5]))
    sums = np.add.reduceat(twice.loss_mask.astype(np.int64), twice.response_offsets[:-1])
    keys = twice.rows["group_index"] * 4 + twice.rows["response_index"]
    twice.rows["trained"] = [sums[keys == key].sum() for key in keys]
    n, fields = LAYOUTS.get(layout, (1, {}))
    opts = options(model, n, **PACKINGS["64 tokens"], **fields, **LOSSES["grpo"])
    [found] = same_everywhere(run_ranks(n, train_on_rank, [opts], twice))
    one = on_one_rank(model, "grpo", other)
    for name in (
        "train/loss",
        "train/pg_loss",
        "train/grad_norm",
        "train/entropy_loss",
        "second/train/loss",
        "second/train/grad_norm",
    ):
        if name in one:
            assert found[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_virtual_pipeline_stages_forward_only(deep: Path) -> None:
    """The old log-probs of several steps are computed without a backward pass."""
    common = {"num_steps_per_rollout": 2, "lr": 1e-2} | PACKINGS["64 tokens"]
    layout = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}
    (one,) = run_ranks(1, train_on_rank, [options(deep, 1, **common)])[0]
    (found,) = same_everywhere(run_ranks(2, train_on_rank, [options(deep, 2, **common, **layout)]))
    for name in ("train/loss", "train/ppo_kl", "train/grad_norm", "second/train/grad_norm"):
        assert found[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6)
    assert abs(found["train/ppo_kl"]) > 1e-3


def test_experts_on_several_ranks_do_not_matter(tmp_path: Path) -> None:
    """Neither to the gradient nor to the reference model, whose experts lie where the policy's do."""
    model, other = (
        make(tmp_path / name, "glm4_moe", odd=True, seed=seed) for seed, name in enumerate(("experts", "others"))
    )
    loss = fields_of("kl loss", other)
    one = gradients(model, 1, loss)
    assert any(".experts.7." in name for name in one)
    assert not torch.equal(one[next(iter(one))], gradients(model, 1, loss | {"ref_load": str(model)})[next(iter(one))])
    for fields in (
        {"expert_model_parallel_size": 2},
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ):
        equal(gradients(model, 2, fields | loss), one)


def gradients(model: Path, n: int, fields: dict[str, Any], data: SampleBatch | None = None) -> dict[str, torch.Tensor]:
    """Those of the fixed batch, or of `data`, under Hugging Face names."""
    whole = {"use_distributed_optimizer": False}  # with it each DP and CP rank has but a part of the gradient
    opts = options(model, n, **PACKINGS["64 tokens"], **fields | {"megatron": {**fields.get("megatron", {}), **whole}})
    return run_ranks(n, gradients_on_rank, opts, data)[0]


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def widths_on_rank(opts: Options) -> tuple[list[int], list[int]]:
    """(rows that passed the output layer, each time that it was called, rows that are trained on in each
    micro-batch)."""
    from hpcrl.trainer.step import packing, train_batch

    policy, seen = start(opts), []
    policy.module.output_layer.register_forward_hook(lambda _, args, output: seen.append(output[0].size(0)))
    (own,) = shares(opts)
    train_batch.train(policy, policy.ranks, opts, own)
    return [rows for rows in seen if rows], [
        len(packing.pack(own.batch, rows, policy.ranks, False).rows) for rows in own.micro_batches[0]
    ]


def clipped_on_rank(opts: Options) -> list[float]:
    """The largest difference of any weight after steps of ours, and after Megatron's own ones, from the same
    weights."""
    from hpcrl.trainer.step import train_batch

    ranks, weights = None, []
    for own in (True, False):
        policy = start(opts, ranks)
        ranks, optimizer = policy.ranks, policy.optimizer
        if not own:
            train_batch.take_step = lambda _, norm, optimizer=optimizer: optimizer.step()[0]
        for _ in range(2):
            train_batch.train(policy, ranks, opts, ShareExchange(ranks).exchange(shares(opts)[ranks.dp_rank]))
        weights.append([p.detach().clone() for module in policy.modules for p in module.parameters()])
    return [float((a - b).abs().max()) for a, b in zip(*weights, strict=True)]


def test_clipping_is_megatrons(model: Path, tmp_path: Path) -> None:
    """Also of experts, whose optimizer is one of two that share one norm."""
    experts = make(tmp_path / "experts", "glm4_moe", odd=True)
    for directory, more in ((model, {}), (experts, {"expert_model_parallel_size": 2})):
        opts = options(directory, 2, **PACKINGS["64 tokens"], clip_grad=0.01, **more)
        assert all(max(differences) == 0.0 for differences in run_ranks(2, clipped_on_rank, opts))


def test_only_rows_that_are_trained_on_get_logits(model: Path) -> None:
    seen, trained = run_ranks(1, widths_on_rank, options(model, **PACKINGS["64 tokens"]))[0]
    assert seen == trained


def test_no_more_rows_than_a_piece_have_logits(model: Path) -> None:
    seen, trained = run_ranks(1, widths_on_rank, options(model, **PACKINGS["64 tokens"], log_probs_chunk_size=7))[0]
    assert max(seen) == 7
    assert sum(seen) == sum(
        rows * (2 if rows > 7 else 1) for rows in trained
    )  # in pieces: forward, and again for backward


def test_a_long_sample_is_whole_and_alone(model: Path) -> None:
    (own,) = shares(options(model, **PACKINGS["40 tokens"]))
    alone = [rows for rows in own.micro_batches[0] if own.batch.rows["length"][rows].max() == LONG]
    assert [len(rows) for rows in alone] == [1]


# ---- several optimizer steps of one rollout


def test_old_logprobs_are_those_before_the_first_step(model: Path) -> None:
    """Two steps with the trainer's own are two steps with what transformers says of the first weights."""
    hf, data = transformers_model(model), deepcopy(batch())
    with torch.no_grad():
        for i, start in enumerate(data.response_offsets[:-1]):
            ids, mask, _ = sample(data, i)
            logprobs = (
                hf(ids[None]).logits[0, -len(mask) - 1 : -1].log_softmax(-1).gather(1, ids[-len(mask) :, None])[:, 0]
            )
            data.rollout_log_probs[start : start + len(mask)] = logprobs.numpy()
    found = {}
    for layout in ("one rank", "dp2 pp2"):
        n, fields = LAYOUTS.get(layout, (1, {}))
        # with Adam's usual epsilon the first step is lr x sign: where a gradient is nothing but noise, so is the step
        common = {"num_steps_per_rollout": 2, "lr": 1e-2, "adam_eps": 1e-4} | fields | PACKINGS["64 tokens"]
        every = [options(model, n, use_rollout_logprobs=given, **common) for given in (False, True)]
        found[layout], given = same_everywhere(run_ranks(n, train_on_rank, every, data))
        for name in ("loss", "pg_loss", "ppo_kl", "pg_clipfrac", "grad_norm"):
            assert found[layout]["train/" + name] == pytest.approx(given["train/" + name], rel=2e-5, abs=1e-6)
            assert found[layout]["train/" + name] == pytest.approx(
                found["one rank"]["train/" + name], rel=2e-5, abs=1e-6
            )
        assert found[layout]["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert found[layout]["train/pg_clipfrac"] > 0
        assert found[layout]["perf/train_tokens"] == data.loss_mask.sum()


# ---- what stops a run before it changes a weight


def test_a_difference_beyond_the_bound(model: Path) -> None:
    opts = options(model, 2, max_logprob_diff=0.1)
    errors = run_ranks(2, failure_on_rank, opts, shares(opts))
    assert errors[0] == errors[1]
    assert re.fullmatch(
        r"rollout 0, optimizer step 0: .* differ by 0\.\d+ \(mean\), --max-logprob-diff is 0\.1; .*", errors[0][0]
    )
    assert errors[0][1]


def test_a_loss_that_is_no_number(model: Path) -> None:
    opts = options(model, 2, pipeline_model_parallel_size=2)
    errors = run_ranks(2, failure_on_rank, opts, shares(opts), True)
    assert {text.split(";")[0] for text, _ in errors} == {"rollout 0, optimizer step 0: the loss is nan"}
    assert all(same for _, same in errors)


def test_a_gradient_without_bound_on_one_rank_only(model: Path) -> None:
    opts = options(model, 2, disable_rewards_normalization=True)
    own = shares(opts, deepcopy(batch()))  # the fixed batch stays as it is for the tests that follow
    own[1].table["reward"][own[1].own] = 1e30  # the table is one for all ranks
    errors = run_ranks(2, failure_on_rank, opts, own)
    assert {text.split(";")[0] for text, _ in errors} == {"rollout 0, optimizer step 0: the gradient norm is inf"}
    assert all(same for _, same in errors)


def test_shares_that_are_not_of_one_batch(model: Path) -> None:
    opts = options(model)
    own = shares(opts)
    own[0].step_tokens[0] += 1
    text, same = run_ranks(1, failure_on_rank, opts, own)[0]
    assert f"train on {own[0].step_tokens[0] - 1} tokens, the batch has {own[0].step_tokens[0]}" in text
    assert same
