"""Keeps groups whose rewards differ: equal ones have no advantage and teach a group-relative estimator nothing (DAPO).

Source: dynamic sampling, Yu et al. 2025, DAPO, arXiv:2503.14476, 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.sample import Sample

EQUAL = 1e-6  #: a standard deviation up to it is rounding


def keep(options: Options, samples: Sequence[Sample]) -> Verdict:
    """Refused for `zero_std_REWARD`, the reward rounded to one digit."""
    rewards = np.asarray([sample.score for sample in samples], np.float64)
    if rewards.std() > EQUAL:
        return Verdict(True)
    return Verdict(False, f"zero_std_{round(float(rewards[0]), 1)}")
