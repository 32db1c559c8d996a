"""The same, but equal rewards are taken where all groups in flight are finished and too few differ: no further ones are
issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcrl.config.options import Options
from hpcrl.rollout.filters import check_reward_nonzero_std
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.sample import Sample


def keep(options: Options, samples: Sequence[Sample]) -> Verdict:
    """As `check_reward_nonzero_std`, with keep_when_insufficient."""
    return replace(check_reward_nonzero_std.keep(options, samples), keep_when_insufficient=True)
