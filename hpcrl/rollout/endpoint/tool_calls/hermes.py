"""Hermes' form, which Qwen2.5 and Qwen3 write too: a JSON object with name and arguments.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

from hpcrl.rollout.endpoint.call_values import FoundCall, Tools, read_json, read_object, scan

MARKS = ("<tool_call>",)
_END = "</tool_call>"


def find(text: str, tools: Tools) -> list[FoundCall]:
    """The calls in a text."""

    def read(at: int) -> FoundCall | None:
        call = read_object(text, at + len(MARKS[0]), _END)
        if call is None:
            return None
        name, arguments = call[0].get("name"), call[0].get("arguments")
        if isinstance(arguments, str):  # the object as JSON once more
            arguments = read_json(arguments) or arguments
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return FoundCall(at, call[1], name, arguments)

    return scan(text, MARKS[0], _END, read)
