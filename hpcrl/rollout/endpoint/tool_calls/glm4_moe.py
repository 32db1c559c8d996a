"""GLM-4.5's form, and with no line breaks between its tags that of GLM-4.7: the name, then keys and values.

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

A value is text, of the type that the tool's schema says.
"""

from __future__ import annotations

import re
from functools import partial

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, closed, scan, tagged_arguments

MARKS = ("<tool_call>", "<arg_key>", "<arg_value>")
_NAME = re.compile(r"<tool_call>\s*([^<>{}\"\s]{1,256})\s*(?=<)")
_KEY = re.compile(r"\s*<arg_key>([^<>]{1,256})</arg_key>\s*<arg_value>")
_VALUE, _END = "</arg_value>", "</tool_call>"


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        if (named := _NAME.match(text, at)) is None:
            return None
        name = named[1]
        arguments, end = tagged_arguments(text, named.end(), _KEY, _VALUE, partial(tools.typed, name))
        end = end if end < 0 else closed(text, end, _END)
        return None if end < 0 else FoundCall(at, end, name, arguments)

    return scan(text, MARKS[0], _END, read)
