"""What each token counts in the loss: per token, per sample, per constant."""

from __future__ import annotations

from torch import Tensor

from hpcrl.config.options import AlgorithmOptions


def token_weights(counts: Tensor, options: AlgorithmOptions) -> Tensor:
    """float [m], what each trained token of a sample with `counts` [m] trained tokens (mask sum) counts.

    per sample (default): 1 / max(count, 1), divisor: samples of the step.  --calculate-per-token-loss: 1, divisor: trained
    tokens of the step.  --loss-divisor N: 1 / N, divisor: samples of the step.  `divides_by_tokens` tells which.
    """
    raise NotImplementedError


def policy_token_weights(counts: Tensor, options: AlgorithmOptions) -> Tensor | None:
    """The same for the policy-gradient term alone, by --custom-pg-loss-reducer-function-path; None without it."""
    raise NotImplementedError


def divides_by_tokens(options: AlgorithmOptions) -> bool:
    """Whether the loss is divided by the step's trained tokens; else by its samples."""
    raise NotImplementedError
