r"""--rm-type dapo: 1 if the last `Answer: ...` of the response says the same as the label, else -1 (slime's `dapo`).

It looks at the last 300 characters.  The answer is the rest of the line, or the next line with text; in it a
\boxed{...}, else the only formula between dollar signs, else what follows the last equals sign.  It returns an object:
score is 1 or -1, acc 1 or 0, pred the answer; the reward is the score unless --reward-key names acc.
"""

from __future__ import annotations

import re

from hpcrl.config.options import Options
from hpcrl.rollout.answers import labels
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.answers.labels import is_right, right_answers
from hpcrl.sample import Sample

KEYS = ("score", "acc")
check = labels.check
TAIL = 300  #: characters at the end of the response that are looked at
_ANSWER = re.compile(r"answer\s*[:：]\s*(?:(?:\\\[|\$\$)\s*)?([^\r\n]+)", re.IGNORECASE)
#: special tokens that were decoded, Markdown's bold and code
_MARKS = re.compile(r"<\|[^|>]*\|>|</s>|(?<![A-Za-z0-9)])\*\*|\*\*(?![A-Za-z0-9(])|`")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_VALUE = re.compile(r"(?<![<>!=:])=([^=]+)$")


def reward(options: Options, sample: Sample) -> dict[str, float | str]:
    found = _ANSWER.findall(_MARKS.sub("", sample.response[-TAIL:]))
    answer = _answer(found[-1].strip()) if found else ""
    right = is_right(answer, sample.label)
    value = None if right else _VALUE.search(answer)
    if value and not any("=" in text for text in right_answers(sample.label)):
        answer = value[1].strip()
        right = is_right(answer, sample.label)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def _answer(line: str) -> str:
    """What a line after `Answer:` says: its box, the one formula in it, or all of it."""
    formulas = _FORMULA.findall(line)
    return find_boxed(line) or ("".join(formulas[0]).strip() if len(formulas) == 1 else line)


def boxed(content: str) -> str:
    return f"Answer: {content}"
