"""ReMax: the baseline is the reward of the greedy response to the same prompt.

    A_it = R_i - R(greedy response)

Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
Use: one response to each prompt and no critic; costs one greedy response more a prompt.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options
from hpcrl.errors import DataError

NEEDS = ("greedy",)


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """ReMax's advantages, the same for every token of a response.

    Raises:
        DataError: if a prompt has no greedy reward.
    """
    if batch.baseline is None or batch.baseline.isnan().any():
        raise DataError("--advantage-estimator remax: a prompt came without the reward of a greedy response")
    return Advantages(batch.to_tokens(batch.reward - batch.baseline))
