"""Anthropic's routes: a request for a message is translated into OpenAI's words, and the answer back.

Invariants: what a run fixes and what is refused is decided by OpenAI's route (`openai.read_chat`), so that the two
agree; the same blocks always become the same messages, so that a chat that comes back with its answers continues with
the very tokens; what is not honoured is an error that names it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from hpcrl.rollout.endpoint import fields
from hpcrl.rollout.endpoint.openai import read_chat
from hpcrl.rollout.endpoint.session import FULL, BadRequest, Session
from hpcrl.rollout.endpoint.turns import MODEL, ChatAnswer, ChatRequest, place, say
from hpcrl.rollout.samplers.trajectory import LENGTH
from hpcrl.untrusted_files import parse_json

#: fields that are honoured as OpenAI's of the same name are
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream", "model", "metadata", "service_tier")
#: fields with the values that ask for nothing else than what is done anyway
_USUAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "context_management": ({"edits": []},),
}
_TRANSLATED = ("messages", "system", "stop_sequences", "tools", "tool_choice")
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


# ---- what is asked


def _read(session: Session, body: Mapping[str, Any]) -> ChatRequest:
    """The request as OpenAI's route reads it.

    Raises:
        BadRequest: names the field that is not as it should be.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in (*_SAME, *_TRANSLATED) and value not in _USUAL.get(name, ()):
            raise BadRequest(f"{name} is not served: leave it out")
    words: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    asked = given.get("messages")
    if not isinstance(asked, list) or not asked:
        raise BadRequest("messages is not a list of messages")
    words["messages"] = [*_system(given.get("system")), *(said for message in asked for said in _said(message))]
    if words["messages"][-1]["role"] == "assistant":
        raise BadRequest("messages ends with one of the assistant's, which is not continued here: end with the user's")
    if "stop_sequences" in given:
        stops = given["stop_sequences"]
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise BadRequest(f"stop_sequences {stops!r:.200} is not a list of texts")
        words |= {"stop": stops} if stops else {}
    if "tools" in given:
        words["tools"] = _tools(given["tools"])
    if "tool_choice" in given:
        words["tool_choice"] = _choice(given["tool_choice"])
    return read_chat(session, words)


def _choice(given: Any) -> str:
    """A tool choice in OpenAI's words."""
    choice = fields.given_object("tool_choice", given)
    if choice.get("type") not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice {choice.get('type')!r} is not served, but for auto and none: the policy calls a tool or "
            "does not"
        )
    if choice.get("disable_parallel_tool_use"):
        raise BadRequest("disable_parallel_tool_use is not served: leave it out")
    return str(choice["type"])


def _tools(given: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI has them."""
    if not isinstance(given, list):
        raise BadRequest("tools is no list of tools")
    found = []
    for tool in given:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools has {tool!r:.200}, which has no name")
        if tool.get("type") not in (None, "custom"):
            raise BadRequest(f"tools has {tool['name']!r} of type {tool['type']!r:.80}: there are tools of yours alone")
        if not isinstance(schema := tool.get("input_schema"), dict):
            raise BadRequest(f"tools has {tool['name']!r} without an object as its input_schema")
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        found.append({"type": "function", "function": function})
    return found


def _system(given: Any) -> list[dict[str, Any]]:
    """The system prompt as a message, if there is one."""
    if given is None or given == []:
        return []
    return [{"role": "system", "content": _text("system", given)}]


def _text(where: str, content: Any) -> str:
    """Text, or blocks of it, as text."""
    if isinstance(content, str):
        return content
    return "".join(_text_of(where, block) for block in _blocks(where, content))


def _text_of(where: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise BadRequest(f"{where} has a block of type {block['type']!r:.80}: there is text alone")
    return _field(block, "text", str)


def _blocks(where: str, content: Any) -> Iterable[dict[str, Any]]:
    """The blocks of a content.

    Raises:
        BadRequest: if it has none.
    """
    if not isinstance(content, list):
        raise BadRequest(f"{where} is neither text nor a list of blocks")
    for block in content:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequest(f"{where} has {block!r:.200}, which is no block with a type")
        yield block


def _field(block: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(block.get(name), kind):
        raise BadRequest(f"a block of type {block['type']} has no {name}, or another thing in its place")
    return block[name]


def _said(message: Any) -> list[dict[str, Any]]:
    """A message as OpenAI has it; one of the user's with results of tools as one for each of these, then its text.

    Raises:
        BadRequest: if it is none, or has a block that is not served.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise BadRequest(f"a message of the role {role!r:.80}: there are user and assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, calls, results = [], [], []
    for block in _blocks(f"content of a message of the {role}'s", content):
        kind = block["type"]
        if kind == "text":
            texts.append(_field(block, "text", str))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": _field(block, "name", str), "arguments": json.dumps(_field(block, "input", dict))}
            calls.append({"id": _field(block, "id", str), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            told = "" if block.get("content") is None else _text("content of a tool_result", block["content"])
            results.append({"role": "tool", "tool_call_id": _field(block, "tool_use_id", str), "content": told})
        else:
            raise BadRequest(f"a block of type {kind!r:.80} in a message of the {role}'s is not served: leave it out")
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if texts or calls or not results else results


# ---- what is answered


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
