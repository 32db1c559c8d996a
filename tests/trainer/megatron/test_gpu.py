"""On one GPU, in bf16: logits and gradients of every family beside those of transformers in fp32.

The bound is what bf16 costs transformers itself on the same tokens, times MARGIN.  Where there is no GPU the tests are
skipped and say so; HPCRL_TEST_GPU=cpu runs them on the CPU instead, to see that they work.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support import families
from tests.trainer.megatron import test_model_parity as parity
from tests.trainer.step import test_invariance as invariance

FOUND = torch.cuda.is_available()
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not FOUND and os.environ.get("HPCRL_TEST_GPU") != "cpu", reason="no GPU on this machine"),
]
MARGIN = 3.0
LOSS = invariance.LOSSES["own old"]  # its own log-probs are the old ones: no rounding decides what is clipped


# ---- on the rank, a process of its own: CUDA does not survive a fork


def on_rank(
    models: list[Path], loss: dict[str, Any]
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor], list[float]]]:
    """Of each model the logits, the gradients under the files' names, and gradient norms without and with
    recomputing."""
    from hpcrl.trainer.megatron import replaced

    replaced.install()
    from hpcrl.trainer.checkpoint.to_torch_dist import alone

    store = alone()
    ranks = None
    found = []
    for path in models:
        norms = []
        for settings in ({}, invariance.RECOMPUTE["uniform"]):
            values = {
                **loss,
                **invariance.PACKINGS["64 tokens"],
                "max_logprob_diff": 100.0,
                "lr": 1e-3,
                "clip_grad": 0.0,
            }
            options = parity.Options(hf_checkpoint=str(path), actor_num_gpus_per_node=1, megatron=settings, **values)
            policy = parity.start(options, ranks)
            ranks = policy.ranks
            if not settings:
                scores = logits(policy)
            gradients, norm = one_step(policy, options)
            norms.append(norm)
        found.append((scores, gradients, norms))
    del store
    return found


def logits(policy: Any) -> torch.Tensor:
    """[rows of all padded sequences, vocabulary], fp32."""
    from hpcrl.trainer.megatron.packed_attention import boundaries

    ids, packed = parity.pack(parity.sequences(policy.vocab_size), 1, 0)
    cu = packed.cu_seqlens_q.to(policy.ranks.device)
    packed = boundaries(cu, packed.ends, packed.max_seqlen_q)
    with torch.no_grad():
        out = parity.schedule(policy, ids.to(policy.ranks.device), packed, lambda out, non_loss_data: out, True)
    return out[0][0][:, : policy.vocab_size].float().cpu()


def one_step(policy: Any, options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """(what the optimizer was about to see, its norm) of one training step."""
    from hpcrl.trainer.megatron import hf_weights
    from hpcrl.trainer.step import train_batch

    parameters = [p for module in policy.modules for p in module.parameters()]
    found = []

    def instead_of_a_step() -> bool:
        found.extend(p.main_grad.to(p.dtype, copy=True) for p in parameters)
        return True

    policy.optimizer.step_with_ready_grads = instead_of_a_step
    (share,) = invariance.shares(options)
    metrics = train_batch.train(policy, policy.ranks, options, ShareExchange(policy.ranks).exchange(share))
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.data = gradient
    return {name: tensor.float().cpu().clone() for name, tensor in hf_weights.export(policy)}, metrics[
        "train/grad_norm"
    ]


# ---- the reference


def reference(path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [rows of all sequences, vocabulary] and gradients of transformers, fp32 from computing in `dtype`."""
    from transformers import AutoModelForCausalLM

    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **settings).eval()
    with torch.no_grad():
        rows = torch.cat([hf(ids[None]).logits[0].float() for ids in parity.sequences(hf.config.vocab_size)])
    data, total = invariance.batch(), torch.zeros(())
    masks = [invariance.sample(data, i)[1] for i in range(invariance.SAMPLES)]
    advantages = invariance.expected_advantages(invariance.Options(), data, masks, [], [])
    for i in range(invariance.SAMPLES):
        ids, mask, _ = invariance.sample(data, i)
        every = hf(ids[None]).logits[0, -len(mask) - 1 : -1].float().log_softmax(-1)
        own = every.gather(1, ids[-len(mask) :, None])[:, 0]
        ratio = (own - own.detach()).exp()
        total = total - (ratio * advantages[i] * mask).sum() / max(float(mask.sum()), 1.0)
    (total / invariance.SAMPLES).backward()
    gradients = {name: p.grad.float() for name, p in hf.named_parameters() if p.grad is not None}
    return rows, gradients


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))


# ---- tests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of heads and sizes that flash attention takes."""
    root = tmp_path_factory.mktemp("gpu")
    return {kind: families.make(root / kind, kind, vocab_size=invariance.VOCAB) for kind in families.SIZES}


@pytest.fixture(scope="module")
def found(models: dict[str, Path]) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return dict(zip(models, pool.apply_async(on_rank, (list(models.values()), LOSS)).get(600), strict=True))


@pytest.mark.parametrize("kind", families.SIZES)
def test_bf16_is_as_near_to_fp32_as_in_transformers(models: dict[str, Path], found: dict[str, Any], kind: str) -> None:
    rows, gradients, norms = found[kind]
    wide, narrow = (reference(models[kind], dtype) for dtype in (torch.float32, torch.bfloat16))
    places, place = [], 0
    for length in parity.LENGTHS:
        places += range(place, place + length)
        place += -(-length // parity.PAD) * parity.PAD
    assert apart(rows[places], wide[0]) <= MARGIN * apart(narrow[0], wide[0])
    names = sorted(gradients.keys() & wide[1].keys())
    assert len(names) > 0.5 * len(wide[1])  # transformers holds all experts of a layer in one tensor
    ours, theirs, wanted = (torch.cat([of[name].flatten() for name in names]) for of in (gradients, narrow[1], wide[1]))
    assert apart(ours, wanted) <= MARGIN * apart(theirs, wanted) + 2**-8
    assert norms[1] == pytest.approx(norms[0], rel=1e-2), "with recomputing"
