"""REINFORCE: the plain policy gradient, without ratio or bounds.

    L = -A log p

Source: Williams 1992, doi:10.1007/BF00992696.
Use: exactly on policy (one optimizer step a rollout), or with --use-tis for what is not.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Terms, TokenBatch
from hpcrl.config.options import Options


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """-A log p of each token; nothing is clipped."""
    return Terms(-tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.advantages))
