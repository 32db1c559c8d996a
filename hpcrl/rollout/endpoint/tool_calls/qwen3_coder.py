"""Qwen3-Coder's form, which Qwen3.5 and its successors write too: a tag for the function and one for each argument.

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value is text, of the type that the tool's schema says, without the line breaks next to its tags.  These models leave
out the outer tags at times, so they are no part of what makes a call.
"""

from __future__ import annotations

import re
from typing import Any

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, closed, scan, tagged_arguments

MARKS = ("<tool_call>", "<function=", "<parameter=")
_OPEN, _CLOSE, _FUNCTION, _VALUE = "<tool_call>", "</tool_call>", "</function>", "</parameter>"
_NAME = re.compile(r"<function=([^<>\s]{1,256})>")
_ARGUMENT = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_NEAR = 64  #: characters before a function's tag among which the outer one is looked for


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        if (named := _NAME.match(text, at)) is None:
            return None
        name = named[1]

        def typed(argument: str, value: str) -> Any:
            return tools.typed(name, argument, value.removeprefix("\n").removesuffix("\n"))

        arguments, end = tagged_arguments(text, named.end(), _ARGUMENT, _VALUE, typed)
        if end < 0 or (end := closed(text, end, _FUNCTION)) < 0:
            return None
        before = text[max(0, at - _NEAR) : at]
        if before.rstrip().endswith(_OPEN):
            at -= len(before) - before.rindex(_OPEN)
        return FoundCall(at, max(end, closed(text, end, _CLOSE)), name, arguments)

    return scan(text, "<function=", _FUNCTION, read)
