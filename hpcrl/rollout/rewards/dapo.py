r"""--rm-type dapo: 1 if the last line `Answer: ...` of the response says the same as the label, else -1 (slime's
`dapo`).

It looks at the last 300 characters, and at the content of a \boxed{...} in that line.  It returns an object: score is 1
or -1, acc 1 or 0, pred the answer; the reward is the score unless --reward-key names acc.
"""

from __future__ import annotations

import re

from hpcrl.config.options import Options
from hpcrl.rollout.answers import labels
from hpcrl.rollout.answers.labels import boxed as find_boxed
from hpcrl.rollout.answers.labels import is_right
from hpcrl.sample import Sample

KEYS = ("score", "acc")
check = labels.check
TAIL = 300  #: characters at the end of the response that are looked at
_ANSWER = re.compile(r"answer\s*:[ \t]*([^\n]+)", re.IGNORECASE)
_MARKS = re.compile(r"<\|[^|>]*\|>|\*\*")  #: special tokens that were decoded, and Markdown's bold


def reward(options: Options, sample: Sample) -> dict[str, float | str]:
    found = _ANSWER.findall(sample.response[-TAIL:])
    line = _MARKS.sub("", found[-1]).strip() if found else ""
    answer = find_boxed(line) or line
    right = is_right(answer, sample.label)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def boxed(content: str) -> str:
    return f"Answer: {content}"
