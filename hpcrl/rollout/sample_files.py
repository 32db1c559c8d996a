"""The sample files of a run: what was asked, answered and earned, one JSON object a sample.

Invariant: a file depends on the samples alone (no times, no engine names), so a repeated step writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from hpcrl.run.rundir import write_atomic
from hpcrl.run.storage_errors import PATIENCE
from hpcrl.sample import Sample


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write the file, whole.  HpcrlError if the disk does not take it."""
    write_atomic(path, b"".join(msgspec.json.encode(_record(sample)) + b"\n" for sample in samples), patience=PATIENCE)


def _record(sample: Sample) -> dict[str, object]:
    """versions: the policy versions that its tokens were sampled under, each once; baseline: where one was asked for;
    removed,
    rewards, grading, grading_error: where there are any."""
    more = {
        "removed": sample.remove_sample,
        "rewards": sample.rewards,
        "grading": sample.grading,
        "grading_error": sample.grading_error,
    }
    baseline = {} if math.isnan(sample.baseline) else {"baseline": sample.baseline}
    return {
        "group": sample.group,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        **baseline,
        "prompt_len": len(sample.tokens) - sample.response_length,
        "response_len": sample.response_length,
        "status": sample.status,
        "versions": np.unique(sample.versions).tolist(),
        "metadata": sample.metadata,
        **{name: value for name, value in more.items() if value},
    }
