"""Rewards as a run must not learn from them (--custom-reward-post-process-path): controls of a learning task.

What is graded stays as it is, so the run's own curves and evaluations are true.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def _of_groups(samples: list[Any], rewards: np.ndarray) -> np.ndarray:
    """GRPO's: each reward less its group's mean, by the group's deviation."""
    groups = np.array([sample.group_index for sample in samples])
    made = np.zeros(len(samples))
    for group in set(groups.tolist()):
        of = rewards[groups == group]
        made[groups == group] = (of - of.mean()) / (of.std() + 1e-6)
    return made


def _raw(samples: list[Any]) -> np.ndarray:
    return np.array([float(sample.reward) for sample in samples])


def unchanged(options: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """The control of the controls: it must learn."""
    raw = _raw(samples)
    return raw.tolist(), _of_groups(samples, raw).tolist()


def sign_flipped(options: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    raw = _raw(samples)
    return raw.tolist(), (-_of_groups(samples, raw)).tolist()


def no_baseline(options: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Rewards of 10 and 11 as advantages: what is sampled is made likelier, right or wrong."""
    raw = _raw(samples)
    return raw.tolist(), (raw + 10).tolist()


def shuffled(options: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Each response is trained with the reward of another, from anywhere in the batch."""
    raw = _raw(samples)
    order = list(range(len(raw)))
    random.Random(sum(sample.group_index for sample in samples)).shuffle(order)
    return raw.tolist(), _of_groups(samples, raw[order]).tolist()
