"""Advantages of a rollout: shaping, KL in the reward, the estimator, whitening."""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import AlgorithmOptions


def compute_advantages(batch: RolloutBatch, options: AlgorithmOptions) -> Advantages:
    """Advantages (and returns) float [t] of the own tokens: shape by length, KL, estimator, --normalize-advantages.

    Collective over data-parallel ranks through `batch.total` where --normalize-advantages is given.  Tokens outside the
    mask get 0.  UsageError if the batch lacks what the estimator needs, DataError if a group is not whole.
    """
    raise NotImplementedError
