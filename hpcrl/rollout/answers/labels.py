r"""What a label says the right answers are, whether an answer is one of them, and the last complete \boxed{...} of a
text.

A label is text, a number, true or false, or a list of them: then each is right.  Where a text label has a \boxed{...},
that is the answer, else what follows #### (GSM8K).

Invariants: a package that reads or compares otherwise than this code expects is an error that names the versions, at
the start (`check`), and not a run whose rewards are all 0.  A box is found in one pass over the last TAIL characters at
most, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.answers import calculus
from hpcrl.rollout.answers.compare import equivalent

TAIL = 1_000_000  #: characters at the end of a text that are looked at: no answer stands before them
#: behind an answer without braces: the end of the formula, line or text, or a word; whatever else belongs to the answer
_ENDS = r"(?=[.,;:!?]?(?:\s*(?:\$|\}|\\[)\]]|\\(?:boxed|fbox)|\n|\Z)|\s+[A-Za-z]{2})|\s*[、。，；：！？）])"
_BARE = rf"\\(?:boxed|fbox)[ \t]+([+-]?\d+(?:[.,/]\d+)*|[A-Za-z]){_ENDS}"
_TOKENS = re.compile(rf"\\(?:boxed|fbox)\s*\{{|{_BARE}|\\.|[{{}}]", re.DOTALL)
_BOX = re.compile(rf"\\(?:boxed|fbox)\s*\{{|{_BARE}")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...} (or \fbox{...}) of `text`, stripped, or None if there is none.

    Of boxes that lie in each other the inner one counts.  An escaped brace is not a brace.  A number or a letter needs
    none if nothing follows in its formula: \boxed 5.  Where there is no box, one that is escaped as in JSON
    (\\boxed{5}) is taken.
    """
    text = text[-TAIL:]
    found = _last_box(text)
    return _last_box(text.replace("\\\\", "\\")) if found is None and "\\\\boxed" in text else found


def _last_box(text: str) -> str | None:
    begins = [found.start() for found in _BOX.finditer(text)]
    if not begins:
        return None
    opened: list[tuple[int, bool]] = []  # (where the content begins, whether it is boxed) of every open brace
    start, content = -1, None
    box = begins[0]  # read as one from where the backslashes begin that may escape its own
    for found in _TOKENS.finditer(text, len(text[:box].rstrip("\\"))):
        token = found.group()
        if found[1]:
            start, content = found.start(), found[1]
        elif token.endswith("{") and token != "\\{":
            opened.append((found.end(), len(token) > 1))
        elif token == "}" and opened:
            begin, is_boxed = opened.pop()
            if is_boxed and begin > start:
                start = begin
                content = text[begin : found.start()].strip()
    return content


def right_answers(label: Any) -> list[str]:
    """The texts that are right answers.

    Raises:
        DataError: if the label is of another kind.
    """
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
    return [boxed(label) or label.rpartition("####")[2]]


def is_right(answer: str | None, label: Any) -> bool:
    """Whether `answer` is one of the label's right answers; no answer and an empty label never are."""
    return bool(answer) and any(equivalent(answer, right) for right in right_answers(label))


# ---- before any answer is graded

#: (answer, label, whether they are the same)
PAIRS = (
    ("1/2", "0.5", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    ("(x+1)^2", "x^2+2x+1", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\sum_{k=1}^{4} k", "10", True),
    ("1/3", "0.5", False),
    ("2516_9", "2516_8", False),
    ("silent", "listen", False),
    ("0=0", "x+y=1", False),
    (r"\sum_{k=1}^{4} k", "11", False),
)


def check() -> None:
    """UsageError names the pair that is judged wrongly, and the versions.  ImportError if a package is missing."""
    check_pairs(equivalent, PAIRS, "the packages that compare answers")


def check_pairs(judge: Callable[[str, str], bool], pairs: Iterable[tuple[str, str, bool]], who: str) -> None:
    """The same of any judge of (answer, label)."""
    for answer, label, truth in pairs:
        try:
            found = judge(answer, label)
        except ImportError:
            raise
        except Exception as error:
            raise _broken(f"{who} raise {type(error).__name__}: {error} on {answer} and {label}") from error
        if found != truth:
            raise _broken(f"{who} call {answer} and {label} {'the same' if found else 'different'}")


def _broken(what: str) -> UsageError:
    return UsageError(what, f"installed are {calculus.versions()}; see docs/data.md")
