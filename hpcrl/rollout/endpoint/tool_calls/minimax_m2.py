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
from functools import partial

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, closed, scan, tagged_arguments

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
        name = named[1]
        arguments, end = tagged_arguments(text, named.end(), _ARGUMENT, _VALUE, partial(tools.typed, name))
        end = end if end < 0 else closed(text, end, _END)
        return None if end < 0 else FoundCall(at, end, name, arguments)

    return scan(text, MARKS[1], _END, read)
