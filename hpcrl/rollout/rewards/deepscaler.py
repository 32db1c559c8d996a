r"""--rm-type deepscaler: as math, of what comes after the thinking (slime's `deepscaler`).

That is the text after the last </think>, or else after ###Response; a response with neither is worth 0.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.rollout.answers import labels
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.answers.labels import is_right
from hpcrl.sample import Sample

check = labels.check
THOUGHT, RESPONSE = "</think>", "###Response"


def reward(options: Options, sample: Sample) -> float:
    answer = None
    if THOUGHT in sample.response:
        answer = find_boxed(sample.response.rpartition(THOUGHT)[2])
    elif RESPONSE in sample.response:
        answer = find_boxed(sample.response.split(RESPONSE)[1])
    return float(is_right(answer, sample.label))


def boxed(content: str) -> str:
    return f"{THOUGHT}\\boxed{{{content}}}"
