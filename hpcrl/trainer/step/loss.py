"""The losses: pure functions of logits and of what is known about each token.

Invariant: the loss of a batch is a sum over its tokens of terms that depend on that token's sample alone, divided by a
count over the whole batch; so it does not depend on micro-batches, nor on TP, PP, CP or DP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from hpcrl.trainer.step.packing import Packed

#: what a report holds, in order; the last is a maximum, the others are sums
REPORT = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "greedy", "difference", "tokens", "difference_max")


# ---- from logits to tokens


class Tokens(NamedTuple):
    """Of each row's distribution, [r]: log-prob of the label, entropy (nats), whether the label is the likeliest token."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    greedy: torch.Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Which columns this rank's logits are.

    size: real tokens; the output layer may have more columns, to divide by TP, and those are no tokens.  group: the
    tensor-parallel ranks that hold the other columns, in order; None where this rank holds all.
    """

    size: int
    group: dist.ProcessGroup | None = None

    def range(self, width: int) -> tuple[int, int]:
        """(number of the first of this rank's `width` columns, how many of them are tokens)."""
        first = width * (dist.get_rank(self.group) if self.group is not None else 0)
        return first, min(max(self.size - first, 0), width)


def tokens(logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, temperature: float = 1.0) -> Tokens:
    """Log-prob of each label, entropy and whether the label is likeliest, under softmax(logits / temperature).

    logits: [r, columns of this rank], any float type, computed in float32 or wider; labels: int64 [r].  All TP ranks get
    the same values; gradients flow to the rank's own columns through log-probs and entropy, in one backward pass: what was
    saved for it becomes the gradient, and a second one is torch's error.  r may be 0.
    """
    return Tokens(*_Softmax.apply(logits, labels, vocabulary, temperature))


class _Softmax(torch.autograd.Function):
    """One pass over the logits and two all-reduces over TP for everything that the losses ask of them.

    With p the softmax of z / T, H its entropy, y the label:
        d log p_y / d z_j = (1[j = y] - p_j) / T        d H / d z_j = -p_j (log p_j + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        least = torch.finfo(dtype).min
        first, real = vocabulary.range(logits.size(1))
        # a padding column that took part would change every log-prob
        peak = logits[:, :real].amax(1).to(dtype) if real else logits.new_full((len(logits),), least, dtype=dtype)
        if vocabulary.group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=vocabulary.group)
        x = torch.sub(logits, peak[:, None])  # in one pass a copy of type `dtype`, which all below changes in place
        if temperature != 1.0:
            x /= temperature
        x[:, real:] = least
        own = (labels >= first) & (labels < first + real)
        index = torch.where(own, labels - first, 0)[:, None]
        label = torch.where(own, x.gather(1, index)[:, 0], 0.0)
        weights = x.exp()
        sums = torch.stack([label, weights.sum(1), x.mul_(weights).sum(1)])
        if vocabulary.group is not None:
            dist.all_reduce(sums, group=vocabulary.group)
        label, total, weighted = sums
        entropy = total.log() - weighted / total
        greedy = label >= 0
        ctx.save_for_backward(weights.div_(total[:, None]), index, own, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(greedy)
        ctx.set_materialize_grads(False)
        return label - total.log(), entropy, greedy

    @staticmethod
    def backward(
        ctx: Any, logprob: torch.Tensor | None, entropy: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor, None, None, None]:
        p, index, own, value = ctx.saved_tensors
        extra = None
        if entropy is not None:
            extra = torch.addcmul(torch.xlogy(p, p), p, value[:, None]).mul_(entropy[:, None] / -ctx.temperature)
        scaled = torch.zeros_like(value) if logprob is None else logprob / ctx.temperature
        grad = p.mul_(-scaled[:, None])  # in place, which spares the largest tensor of the step a copy
        grad.scatter_add_(1, index, torch.where(own, scaled, 0.0)[:, None])
        if extra is not None:
            grad += extra
        return grad.to(ctx.dtype), None, None, None


# ---- losses


@dataclass(frozen=True)
class Clip:
    """The policy loss's settings: --eps-clip, --eps-clip-high, --eps-clip-c (None: no dual clip), --entropy-coef."""

    low: float
    high: float
    dual: float | None
    entropy: float


def policy_terms(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: Clip
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss of each token (Schulman et al. 2017, arXiv:1707.06347, eq. 7), and where clipping took effect.

    max(-r A, -clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old); with a dual clip (Ye et al. 2020,
    arXiv:1912.09729) at most -dual A where A < 0.  All [r].
    """
    ratio = (logprobs - old).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss = torch.maximum(plain, clipped)
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)
    return loss, (clipped > plain).float()


def policy_loss(found: Tokens, packed: Packed, clip: Clip, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted token losses, report) of a micro-batch.

    weights: float32 [r], what each token counts; report: float64 [REPORT].  Without old log-probs in `packed` its own
    are the old ones.  The difference in the report is between the engine's log-probs and the trainer's under the
    weights that sampled.
    """
    own = found.logprobs.detach()
    old = own if packed.old_logprobs is None else packed.old_logprobs
    terms, clipped = policy_terms(found.logprobs, old, packed.advantages, clip)
    loss = (terms * weights).sum()
    if clip.entropy:
        loss = loss - clip.entropy * (found.entropy * weights).sum()
    sampling = own if packed.old_logprobs is packed.rollout_logprobs else old
    difference = (sampling - packed.rollout_logprobs).abs()
    values = {"pg_loss": terms, "pg_clipfrac": clipped, "ppo_kl": old - own, "entropy": found.entropy}
    return loss, _report(loss, values, weights, difference)


def sft_loss(found: Tokens, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted negative log-probs, report) of a micro-batch; weights: float32 [r]."""
    loss = -(found.logprobs * weights).sum()
    return loss, _report(loss, {"entropy": found.entropy, "greedy": found.greedy.float()}, weights)


@torch.no_grad()
def _report(
    loss: torch.Tensor, values: dict[str, torch.Tensor], weights: torch.Tensor, difference: torch.Tensor | None = None
) -> torch.Tensor:
    """REPORT as float64: weighted sums of `values`, and the plain sum and maximum of `difference`."""
    sums = {"loss": loss, "tokens": loss.new_tensor(weights.numel())}
    sums |= {name: (value * weights).sum() for name, value in values.items()}
    if difference is not None and difference.numel():
        sums |= {"difference": difference.sum(), "difference_max": difference.max()}
    zero = torch.zeros_like(loss)
    return torch.stack([sums.get(name, zero).double() for name in REPORT])
