"""The losses: pure functions of logits and a packed micro-batch.

Invariant: the loss of a batch is a sum over its tokens of terms that depend on that token's sample alone, divided by a
count over the whole batch; so it does not depend on micro-batches, nor on TP, PP, CP or DP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from hpcrl.trainer.packing import Packed


@dataclass(frozen=True)
class Clip:
    """The policy loss's settings: --eps-clip, --eps-clip-high, --eps-clip-c (None: no dual clip), --entropy-coef."""

    low: float
    high: float
    dual: float | None
    entropy: float


def scaled(logits: torch.Tensor, vocab_size: int, temperature: float) -> torch.Tensor:
    """float32 logits over the temperature, the padding rows of the vocabulary at -inf.

    logits: [..., vocabulary / TP] of this rank.  A padded row that took part in the softmax would change every log-prob.
    """
    logits = logits.float() / temperature
    width = logits.size(-1)
    keep = vocab_size - parallel_state.get_tensor_model_parallel_rank() * width
    if keep >= width:
        return logits
    return logits.masked_fill(torch.arange(width, device=logits.device) >= keep, torch.finfo(torch.float32).min)


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-prob of each row's label, float32 [t].

    logits: float32 [1, t, vocabulary / TP], as `scaled` leaves them; labels: int64 [1, t].
    """
    # the cross entropy changes its input in place and keeps it for its backward pass
    return -vocab_parallel_cross_entropy(logits.transpose(0, 1).clone(), labels.transpose(0, 1)).squeeze(1)


class _SumOverTensorRanks(torch.autograd.Function):
    """All-reduce forward, identity backward: every rank computes the same loss from the sum."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        x = x.clone()
        dist.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return grad


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's distribution, float32 [t]: log Z - sum p x, over the vocabulary of all TP ranks."""
    logits = logits.squeeze(0)
    peak = logits.detach().amax(-1, keepdim=True)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak
    weights = shifted.exp()
    total, weighted = _SumOverTensorRanks.apply(torch.stack([weights.sum(-1), (weights * shifted).sum(-1)]))
    return total.log() - weighted / total


def policy_terms(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: Clip
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss of each token (Schulman et al. 2017, arXiv:1707.06347, eq. 7), and where clipping took effect.

    max(-r A, -clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old); with a dual clip (Ye et al. 2020,
    arXiv:1912.09729) at most -dual A where A < 0.  All [t].
    """
    ratio = (logprobs - old).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss = torch.maximum(plain, clipped)
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)
    return loss, (clipped > plain).float()


def policy_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, packed: Packed, clip: Clip, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted token losses, report) of a micro-batch.

    logprobs, entropy: [t]; weights: float32 [t], what each token counts (0 for padding).  report: float64 [REPORT].
    The difference in the report is between the engine's log-probs and the trainer's under the weights that sampled.
    """
    old = logprobs.detach() if packed.old_logprobs is None else packed.old_logprobs
    sampling = logprobs if packed.old_logprobs is packed.rollout_logprobs else old
    terms, clipped = policy_terms(logprobs, old, packed.advantages, clip)
    loss = _weighted(terms, weights)
    if clip.entropy:
        loss = loss - clip.entropy * _weighted(entropy, weights)
    with torch.no_grad():
        mask = packed.mask
        difference = (sampling - packed.rollout_logprobs).abs() * mask
        means = [_weighted(values, weights) for values in (terms, clipped, old - logprobs, entropy)]
        sums = [loss, *means, difference.sum(), mask.sum()]
        report = torch.stack([s.detach().double() for s in sums] + [difference.max().double()])
    return loss, report


def sft_loss(logprobs: torch.Tensor, packed: Packed, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted negative log-probs, report) of a micro-batch."""
    loss = -_weighted(logprobs, weights)
    zero = torch.zeros((), dtype=torch.float64, device=logprobs.device)
    report = torch.stack([loss.detach().double(), zero, zero, zero, zero, zero, packed.mask.sum().double(), zero])
    return loss, report


def _weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of values x weights, where a weight of 0 also silences an infinite value (0 x inf is not 0)."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


#: what a report holds, in order; the last is a maximum, the others are sums
REPORT = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "difference", "tokens", "difference_max")
