"""None: rewards are not learned from; what --use-opd takes off for the teacher is all.

    A_it = 0

Source: on-policy distillation, Lu and Thinking Machines Lab 2025,
https://thinkingmachines.ai/blog/on-policy-distillation.
Use: a student that is to answer as its teacher does; rewards, where there are any, are logged.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options

NEEDS = ("teacher",)


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """Zeros."""
    return Advantages(torch.zeros(len(batch.mask), dtype=torch.float64, device=batch.mask.device))
