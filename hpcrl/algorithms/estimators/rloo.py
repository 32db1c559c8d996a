"""RLOO: the baseline is the mean reward of the other responses to the prompt.

    A_it = R_i - mean of R_j over j != i of the group = n / (n - 1) (R_i - mean(R));  0 in a group of one

Source: Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; --kl-coef takes the response's KL off its reward, as there.
Use: an unbiased baseline without a critic; rewards are not scaled by their spread.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options

NEEDS = ("groups",)


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """RLOO's advantages, the same for every token of a response."""
    size = batch.group_size
    centred = batch.reward - batch.group_mean(batch.reward)
    return Advantages(batch.to_tokens(centred * size / (size - 1).clamp(min=1)))
