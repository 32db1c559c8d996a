"""The losses: pure functions of what is known about each token.

Invariant: the loss of a batch is a sum over its tokens of terms that depend on that token's sample alone, divided by a
count over the whole batch; so it does not depend on micro-batches, nor on TP, PP, CP or DP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpcrl.trainer.step.token_logprobs import Tokens

if TYPE_CHECKING:
    from hpcrl.trainer.step.packing import Packed

#: what a report holds, in order; the last is a maximum, the others are sums
REPORT = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "greedy", "difference", "tokens", "difference_max")


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
