"""How old the samples of a share are when the trainer consumes them.  Pure.

Invariant: no batch is trained on whose tokens lag behind the policy by more than the bound, or that is meant for
another policy, whatever the rollout process made of it.
"""

from __future__ import annotations

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.queue.share_format import Share


def check_staleness(share: Share, version: int, bound: int | None = 0) -> None:
    """HpcrlError if the share, or a token of it, is older than `bound` policy versions (None: any age) or newer than
    the trainer.

    version: the trainer's policy as the share is consumed.  The error names the sample, its versions and the bound.
    """
    oldest = 0 if bound is None else version - bound
    allowed = "by any number" if bound is None else f"by {bound} at most"
    if not oldest <= share.version <= version:
        raise HpcrlError(
            f"rollout {share.rollout_id} was made for policy version {share.version}, the trainer is at {version} "
            f"and may lag {allowed}"
        )
    versions = share.batch.versions
    bad = (versions < oldest) | (versions > version)
    if bad.any():
        number = int(np.searchsorted(share.batch.response_offsets, int(bad.argmax()), side="right")) - 1
        row, start, end = share.batch.rows[number], *share.batch.response_offsets[number : number + 2]
        own = versions[start:end]
        raise HpcrlError(
            f"rollout {share.rollout_id}: sample {row['index']} of group {row['group']} was sampled under policy versions "
            f"{own.min()} to {own.max()}, the trainer is at {version} and may lag {allowed}"
        )
