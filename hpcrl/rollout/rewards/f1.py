"""--rm-type f1: the F1 score of the response's words against the label's (slime's `f1`, as SQuAD and HotpotQA have it).

Words are compared in lower case without punctuation and the articles a, an, the.  Where either is yes, no or noanswer,
both must be.  Of a list of labels the best counts.  Rajpurkar et al., EMNLP 2016, section 6.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from hpcrl.config.options import Options
from hpcrl.sample import Sample

LABELS = ("words", "number", "truth", "list")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_VERDICTS = {"yes", "no", "noanswer"}


def reward(options: Options, sample: Sample) -> float:
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    return max((f1(sample.response, label) for label in labels), default=0.0)


def f1(response: str, label: Any) -> float:
    """2 precision recall / (precision + recall) over the words, in [0, 1]."""
    return scores(response, label)[0]


def scores(response: str, label: Any) -> tuple[float, float, float]:
    """(F1, precision, recall) over the words."""
    said, wanted = _normal(response), _normal(str(label))
    if said != wanted and _VERDICTS & {said, wanted}:
        return 0.0, 0.0, 0.0
    said_words, wanted_words = said.split(), wanted.split()
    common = sum((Counter(said_words) & Counter(wanted_words)).values())
    if not common:
        return 0.0, 0.0, 0.0
    f1 = 2 * common / (len(said_words) + len(wanted_words))
    return f1, common / len(said_words), common / len(wanted_words)


def _normal(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
