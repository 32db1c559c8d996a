r"""What a label says the right answers are.

A label is text, a number, true or false, or a list of them: then each is right.  Where a text label has a \boxed{...},
that is the answer.
"""

from __future__ import annotations

from typing import Any

from hpcrl.errors import DataError
from hpcrl.rollout.answers.boxed import boxed
from hpcrl.rollout.answers.compare import equivalent


def right_answers(label: Any) -> list[str]:
    """The texts of which any is right.  DataError if the label is none of the above."""
    if isinstance(label, list):
        return [text for item in label for text in right_answers(item)]
    if isinstance(label, bool):
        return [str(label).lower()]
    if isinstance(label, int | float):
        return [repr(label)]
    if not isinstance(label, str):
        raise DataError(
            f"the label is {'null' if label is None else type(label).__name__}, not an answer", "see --label-key"
        )
    return [boxed(label) or label]


def is_right(answer: str | None, label: Any) -> bool:
    """Whether `answer` is one of the label's right answers; no answer and an empty label never are."""
    return bool(answer) and any(equivalent(answer, right) for right in right_answers(label))
