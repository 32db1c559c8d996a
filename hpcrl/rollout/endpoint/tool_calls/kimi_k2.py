"""Kimi-K2's form: an id that has the function's name in it, then the arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

The template writes the id before the tool's answer, so the client gets the id that the model wrote.
"""

from __future__ import annotations

import re

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, read_object, scan

MARKS = ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")
WRAPPERS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OPEN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(
    r"<\|tool_call_begin\|>\s*((?:functions\.)?([^<>:\s]{1,256}):\d{1,9})\s*<\|tool_call_argument_begin\|>"
)


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        if (head := _HEAD.match(text, at)) is None:
            return None
        arguments = read_object(text, head.end(), _END)
        return arguments and FoundCall(at, arguments[1], head[2], arguments[0], head[1])

    return scan(text, _OPEN, _END, read)
