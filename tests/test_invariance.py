"""The loss depends on the batch alone: the same loss and gradient norm for every packing and every layout.

The reference is the same loss written down plainly for transformers and autograd, one sample at a time.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.options import Options
from hpcrl.queue.wire import Share
from hpcrl.sample import COMPLETED, Sample, SampleBatch
from hpcrl.schedule import make_schedule
from tests.ranks import RankError, run_ranks
from tests.tiny import make_model

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
PACKINGS: dict[str, dict[str, Any]] = {
    "one sample each": {"micro_batch_size": 1},
    "three each": {"micro_batch_size": 3},
    "40 tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40},
    "64 tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "all in one": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100_000},
}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"use_rollout_logprobs": True, "eps_clip": 0.1, "eps_clip_high": 0.15, "entropy_coef": 0.01, "rollout_temperature": 0.8},
    "per token": {"use_rollout_logprobs": True, "calculate_per_token_loss": True, "eps_clip_c": 1.05},
    "own old": {},
    "sft": {"loss_type": "sft_loss"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=VOCAB)


def options(model: Path, n: int = 1, **values: Any) -> Options:
    return Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=n, lr=1e-3, clip_grad=0.0, max_logprob_diff=100.0, **values)


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
                group=number // 4,
                index=number % 4,
                tokens=rng.integers(1, VOCAB, length).astype(np.int32),
                response_length=response,
                loss_mask=mask,
                logprobs=rng.normal(-5, 0.7, response).astype(np.float32),
                versions=np.zeros(response, np.int32),
                advantage=float(rng.normal()),
                status=COMPLETED,
            )
        )
    return SampleBatch.of(samples)


def share(opts: Options, dp_rank: int) -> Share:
    """The rank's share of the fixed batch."""
    whole = batch()
    limit = opts.max_tokens_per_gpu if opts.use_dynamic_batch_size else None
    schedule = make_schedule(
        whole.rows["length"].tolist(),
        dp=opts.data_parallel_size,
        cp=opts.context_parallel_size,
        max_tokens_per_gpu=limit,
        micro_batch_size=opts.micro_batch_size,
    )
    own = schedule.steps[dp_rank][0]
    rows = [i for micro in own for i in micro]
    local = iter(range(len(rows)))
    micros = [[[next(local) for _ in micro] for micro in own]]
    return Share(0, 0, whole.take(rows), micros, [SAMPLES], [int(whole.loss_mask.sum())])


# ---- on the ranks


def train_on_rank(opts: Options) -> dict[str, float]:
    from hpcrl.trainer import megatron, model, step

    policy = model.build(opts, megatron.initialize(opts))
    model.load_hf(policy, opts.hf_checkpoint)
    mine = step.spread(share(opts, policy.ranks.dp_rank), policy.ranks)
    assert mine is not None
    first = step.train(policy, policy.ranks, opts, mine)
    second = step.train(policy, policy.ranks, opts, mine)
    assert step.spread(None, policy.ranks) is None
    return first | {"second/" + name: value for name, value in second.items()}


# ---- the reference


@cache
def reference(model: Path, loss: str) -> tuple[float, float, float]:
    """(loss, gradient norm, mean |own - engine's log-prob|) by transformers and autograd."""
    from transformers import AutoModelForCausalLM

    opts = options(model, **LOSSES[loss])
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    data, total, difference = batch(), torch.zeros(()), 0.0
    tokens, responses = data.token_offsets, data.response_offsets
    for i in range(SAMPLES):
        ids = torch.from_numpy(data.tokens[tokens[i] : tokens[i + 1]].astype(np.int64))
        mask = torch.from_numpy(data.loss_mask[responses[i] : responses[i + 1]].astype(np.float32))
        engine = torch.from_numpy(data.logprobs[responses[i] : responses[i + 1]])
        n = len(mask)
        logits = hf(ids[None]).logits[0, -n - 1 : -1] / opts.rollout_temperature
        every = logits.log_softmax(-1)
        own = every.gather(1, ids[-n:, None])[:, 0]
        difference += float(((own.detach() - engine).abs() * mask).sum())
        terms = _terms(own, engine if opts.use_rollout_logprobs else own.detach(), float(data.rows["advantage"][i]), opts)
        terms = terms - opts.entropy_coef * -(every.exp() * every).sum(-1)
        total = total + (terms * mask).sum() / (1.0 if opts.calculate_per_token_loss else max(float(mask.sum()), 1.0))
    total = total / (float(data.loss_mask.sum()) if opts.calculate_per_token_loss else SAMPLES)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm()
    return float(total.detach()), float(norm), difference / float(data.loss_mask.sum())


def _terms(own: torch.Tensor, old: torch.Tensor, advantage: float, opts: Options) -> torch.Tensor:
    if opts.loss_type == "sft_loss":
        return -own
    ratio = (own - old).exp()
    high = opts.eps_clip if opts.eps_clip_high is None else opts.eps_clip_high
    loss = torch.max(-ratio * advantage, -ratio.clamp(1 - opts.eps_clip, 1 + high) * advantage)
    if opts.eps_clip_c and advantage < 0:
        loss = loss.clamp(max=-opts.eps_clip_c * advantage)
    return loss


# ---- tests


def agree(found: list[dict[str, float]], model: Path, loss: str) -> None:
    assert all({k: v for k, v in r.items() if "time" not in k} == {k: v for k, v in found[0].items() if "time" not in k} for r in found)
    wanted, norm, difference = reference(model, loss)
    assert found[0]["train/loss"] == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert found[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    if loss != "sft":
        assert found[0]["train/train_rollout_logprob_abs_diff"] == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_does_not_matter(model: Path, packing: str, loss: str) -> None:
    agree(run_ranks(1, train_on_rank, options(model, **PACKINGS[packing], **LOSSES[loss])), model, loss)


@pytest.mark.parametrize("loss", ["grpo", "per token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(model: Path, layout: str, loss: str) -> None:
    n, fields = LAYOUTS[layout]
    packing = PACKINGS["one sample each" if loss == "per token" else "64 tokens"]
    agree(run_ranks(n, train_on_rank, options(model, n, **packing, **fields, **LOSSES[loss])), model, loss)


def test_the_second_step_is_the_same_too(model: Path) -> None:
    """So the optimizer saw the same gradients, not only gradients of the same norm."""
    args = PACKINGS["64 tokens"] | LOSSES["grpo"]
    one = run_ranks(1, train_on_rank, options(model, **args))[0]
    for layout in ("dp2 cp2", "tp2 pp2"):
        n, fields = LAYOUTS[layout]
        other = run_ranks(n, train_on_rank, options(model, n, **args, **fields))[0]
        for name in ("second/train/loss", "second/train/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-5)
        assert one["second/train/loss"] != one["train/loss"]


def test_a_long_sample_is_whole_and_alone(model: Path) -> None:
    own = share(options(model, **PACKINGS["40 tokens"]), 0)
    alone = [rows for rows in own.micro_batches[0] if own.batch.rows["length"][rows].max() == LONG]
    assert [len(rows) for rows in alone] == [1]


def test_packing_pads_nothing_without_need(model: Path) -> None:
    found = run_ranks(1, packed_rows, options(model))[0]
    assert found == int(batch().rows["length"].sum())


def packed_rows(opts: Options) -> int:
    from hpcrl.trainer import megatron, packing

    ranks = megatron.initialize(opts)
    return packing.pack(batch(), range(SAMPLES), ranks, False).tokens.size(1)


def test_a_difference_beyond_the_bound_stops_before_the_step(model: Path) -> None:
    strict = Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=1, max_logprob_diff=0.1)
    with pytest.raises(RankError, match=r"rollout 0, optimizer step 0.*--max-logprob-diff is 0.1"):
        run_ranks(1, train_on_rank, strict)
