"""--rm-type exact: 1 if the whole response is the label, white space around either aside, else 0."""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.sample import Sample

LABELS = ("text", "number", "truth", "list", "json")


def reward(options: Options, sample: Sample) -> float:
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    return float(sample.response.strip() in [str(label).strip() for label in labels])
