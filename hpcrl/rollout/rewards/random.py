"""--rm-type random: 0 or 1 by chance, for trying out a run without a task (slime's `random`).

The coin is a function of the seed, the sample's place and its response, so a run that is repeated throws the same.
"""

from __future__ import annotations

import hashlib

from hpcrl.config.options import Options
from hpcrl.sample import Sample

LABELS = ()


def reward(options: Options, sample: Sample) -> float:
    text = f"{options.rollout_seed}/{sample.group_index}/{sample.response_index}/{sample.response}".encode(
        errors="replace"
    )
    return float(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)
