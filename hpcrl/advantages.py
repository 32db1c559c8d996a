"""Advantages from rewards: pure functions of numbers."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6  #: keeps a group whose rewards are all equal at advantage 0


def group_advantages(rewards: np.ndarray, std_normalize: bool = True) -> np.ndarray:
    """GRPO's group-relative advantages (Shao et al. 2024, arXiv:2402.03300, 4.1.1).

    rewards: float [groups, n].  Returns float64 [groups, n]: reward minus the group's mean, divided by (unbiased standard
    deviation + 1e-6) if `std_normalize` and n > 1; without it, Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783).
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if not std_normalize or rewards.shape[1] == 1:
        return centred
    return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + EPSILON)
