"""MiniMax-M2's form: a tag for the function and one for each argument, with their names as attributes.

    <minimax:tool_call>
    <invoke name="add">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

A value is text, of the type that the tool's schema says.
"""

from __future__ import annotations

import re
from typing import Any

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, closed, scan

MARKS = ("<minimax:tool_call>", "<invoke name=")
WRAPPERS = ("<minimax:tool_call>", "</minimax:tool_call>")
_NAME = re.compile(r"<invoke name=\"?([^<>\"\s]{1,256})\"?>")
_ARGUMENT = re.compile(r"\s*<parameter name=\"?([^<>\"\n]{1,256})\"?>")
_VALUE, _END = "</parameter>", "</invoke>"


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        if (named := _NAME.match(text, at)) is None:
            return None
        name, arguments, end = named[1], dict[str, Any](), named.end()
        while (argument := _ARGUMENT.match(text, end)) is not None:
            if (stop := text.find(_VALUE, argument.end())) < 0:
                return None
            arguments[argument[1]] = tools.typed(name, argument[1], text[argument.end() : stop])
            end = stop + len(_VALUE)
        end = closed(text, end, _END)
        return None if end < 0 else FoundCall(at, end, name, arguments)

    return scan(text, MARKS[1], _END, read)
