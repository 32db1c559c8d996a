"""DeepSeek's form: of V3 and R1 with the arguments in a block of code, of V3.1 without.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, read_object, scan

MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")
WRAPPERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
ARGUMENTS_AS_TEXT = True  #: the templates join them to text
_OPEN, _END, _FENCE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```"
_NAME = r"([^<>{}\s]{1,256})"
_HEAD = re.compile(rf"{_OPEN}\s*{_NAME}\s*<｜tool▁sep｜>(?:\s*{_NAME}\s*```(?:json)?)?")


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        if (head := _HEAD.match(text, at)) is None:
            return None
        arguments = read_object(text, head.end(), _END, _FENCE if head[2] else "")
        return arguments and FoundCall(at, arguments[1], head[2] or head[1], arguments[0])

    return scan(text, _OPEN, _END, read)
