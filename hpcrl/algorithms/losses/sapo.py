"""SAPO: a soft gate instead of clipping; the gradient fades as the ratio leaves 1.

    L = -f(r) A        f(r) = 4 / tau sigmoid(tau (r - 1))        r = exp(log p - log p_old)
    tau = sapo_tau_pos where A > 0, else sapo_tau_neg

Source: Gao et al. 2025, arXiv:2511.20347, eq. 5 and 6.
Use: where hard clipping loses too much; negative advantages fade faster (--sapo-tau-neg above --sapo-tau-pos).
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Terms, TokenBatch, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("sapo_tau_pos", "sapo_tau_neg")


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """The gated loss of each token; nothing is clipped."""
    ratio = ratio_of(tokens.logprobs - tokens.old)
    tau = torch.full_like(ratio, options.sapo_tau_neg).masked_fill(tokens.advantages > 0, options.sapo_tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Terms(-gate * tokens.advantages, torch.zeros_like(tokens.advantages))
