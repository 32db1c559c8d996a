r"""--rm-type math_verify: math-verify's own verdict on the last \boxed{...} of the response, 1 or 0.

Its verdict is taken as it is; where math is stricter (bases, anagrams, equations without variables) docs/data.md
says so. Only its LaTeX grammar is used: what it does with plain expressions ends in Python's eval.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.rollout.answers import calculus
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.answers.labels import check_pairs, right_answers
from hpcrl.sample import Sample

LONGEST = 2000  #: characters of an answer that is read


def reward(options: Options, sample: Sample) -> float:
    answer = find_boxed(sample.response)
    if not answer or len(answer) > LONGEST:
        return 0.0
    return float(any(_same(right, answer) for right in right_answers(sample.label)))


def _same(label: str, answer: str) -> bool:
    if label.strip() == answer.strip():
        return bool(answer.strip())
    return calculus.same(label.strip("$ "), answer.strip("$ "))


def boxed(content: str) -> str:
    return f"\\boxed{{{content}}}"


def check() -> None:
    """Raise UsageError if the installed math-verify gets what it should not get wrong."""
    pairs = (("1/2", "0.5", True), (r"\{1,2\}", r"\{2,1\}", True), ("1/3", "0.5", False))
    check_pairs(lambda answer, label: _same(label, answer), pairs, "the functions of math-verify")
