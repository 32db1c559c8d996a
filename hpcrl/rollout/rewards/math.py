r"""--rm-type math: 1 if the last \boxed{...} of the response says the same as the label, else 0 (slime's `math`)."""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.rollout.answers import labels
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.answers.labels import is_right
from hpcrl.sample import Sample

check = labels.check


def reward(options: Options, sample: Sample) -> float:
    return float(is_right(find_boxed(sample.response), sample.label))


def boxed(content: str) -> str:
    return f"\\boxed{{{content}}}"
