"""Anthropic's routes: a request for a message is translated into OpenAI's words, and the answer back.

Invariants: the same blocks always become the same messages, so that a chat that comes back with its answers continues
with the very tokens; what is not honoured is an error that names it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hpcrl.rollout.endpoint.requests import (
    AssistantMessage,
    MessagesBody,
    OwnTool,
    TextBlock,
    ToolResult,
    ToolUse,
    UserMessage,
    check_sampling,
    read,
)
from hpcrl.rollout.endpoint.session import FULL, BadRequest, Session
from hpcrl.rollout.endpoint.turns import MODEL, ChatAnswer, ChatRequest, place, say
from hpcrl.rollout.samplers.trajectory import LENGTH
from hpcrl.utils.untrusted_files import parse_json

#: the type of an error with this status
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def messages(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat."""
    return _message(await say(session, _read(session, body)))


async def count_tokens(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """How many tokens the policy would be asked with."""
    dialogue, told, _ = place(session, _read(session, body))
    return {"input_tokens": len(dialogue.trajectory.tokens) + len(told)}


# ---- requests


def _read(session: Session, body: Mapping[str, Any]) -> ChatRequest:
    """The request in OpenAI's words.

    Raises:
        BadRequest: names the field that is not as it should be.
    """
    asked = read(body, MessagesBody)
    check_sampling(asked, session.making.sampling)
    if isinstance(asked.messages[-1], AssistantMessage):
        raise BadRequest("messages ends with one of the assistant's, which is not continued here: end with the user's")
    if asked.tool_choice is not None and asked.tool_choice.disable_parallel_tool_use:
        raise BadRequest("disable_parallel_tool_use is not served: leave it out")
    said = [{"role": "system", "content": _text(asked.system)}] if asked.system not in (None, []) else []
    for message in asked.messages:
        said += _user(message) if isinstance(message, UserMessage) else [_assistant(message)]
    params: dict[str, Any] = {"stop": asked.stop_sequences} if asked.stop_sequences else {}
    if asked.max_tokens is not None:
        params["max_new_tokens"] = asked.max_tokens
    calls = asked.tool_choice is None or asked.tool_choice.type != "none"
    return ChatRequest(said, [_tool(tool) for tool in asked.tools] if asked.tools else None, params, calls=calls)


def _tool(tool: OwnTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(content: str | Sequence[Any] | None) -> str:
    """Text, or the text blocks of a content, as text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _user(message: UserMessage) -> list[dict[str, Any]]:
    """One with results of tools is a message for each of these, then its text."""
    blocks = [] if isinstance(message.content, str) else message.content
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in blocks
        if isinstance(block, ToolResult)
    ]
    alone = results and not any(isinstance(block, TextBlock) for block in blocks)
    return results if alone else [*results, {"role": "user", "content": _text(message.content)}]


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": _text(message.content)}
    calls = [
        {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": json.dumps(use.input)}}
        for use in message.content
        if isinstance(use, ToolUse)
    ]
    return said | ({"tool_calls": calls} if calls else {})


# ---- answers


def _message(said: ChatAnswer) -> dict[str, Any]:
    """An answer as Anthropic has it."""
    blocks: list[dict[str, Any]] = []
    calls = said.message.get("tool_calls", [])
    if said.message["content"] or not calls:
        blocks.append({"type": "text", "text": said.message["content"]})
    for call in calls:
        function = call["function"]
        read = parse_json(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": read})
    reason = "tool_use" if calls else "max_tokens" if said.finish == LENGTH else "end_turn"
    reason = "stop_sequence" if said.stop is not None and not calls else reason
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": said.stop,
        "usage": {
            "input_tokens": said.before,
            "output_tokens": len(said.turn.tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def message_events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """An answer's events: its head, each block with its start, what is in it and its end, then why it ended."""
    usage = answer["usage"]
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield event("message_start", message=dict(answer) | empty)
    yield event("ping")
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            begun, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=block | begun)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=end, usage=usage)
    yield event("message_stop")


def event(type: str, **data: Any) -> bytes:
    """One event."""
    return b"event: " + type.encode() + b"\ndata: " + msgspec.json.encode({"type": type} | data) + b"\n\n"


def failure(status: int, message: str, code: str) -> dict[str, Any]:
    """An error as Anthropic's servers say it."""
    if code == FULL:
        message = f"prompt is too long: {message}"  # what clients of Anthropic's look for
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
