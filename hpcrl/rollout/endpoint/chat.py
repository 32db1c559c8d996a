"""Conversations of askers that know messages and text alone: which request continues which, and what it adds.

Invariants: a request continues a conversation if it begins with all of that one's messages (or its whole text, or
tokens); then only what is new is encoded, and the policy's turns keep the tokens that were sampled.  Any other request
begins a conversation of its own, whose earlier turns, if it has some, are prompt: not learned from.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hpcrl.rollout.prompts.tokenizer import Messages, Tokenizer
from hpcrl.rollout.samplers.trajectory import Trajectory, continuation, opening, plain
from hpcrl.untrusted_files import parse_json

#: a call as Qwen's and Hermes' templates ask for it
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass
class Dialogue:
    """One conversation.

    Attributes:
        messages: normal forms, of a chat.
        text: all of it, of completions.
        busy: a turn is being made.
    """

    trajectory: Trajectory
    messages: list[Any] = field(default_factory=list)
    tools: str = ""
    text: str = ""
    busy: bool = False


def normal(message: dict[str, Any]) -> tuple[Any, ...]:
    """What of a message makes it the same as another: who, what text, which calls.

    Raises:
        ValueError: if it is none.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError("a message is not an object with a role")
    calls = message.get("tool_calls") or []
    try:
        named = tuple((c["function"]["name"], _arguments(c["function"].get("arguments"))) for c in calls)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("tool_calls is not a list of calls of functions") from None
    return role, plain(message.get("content")).strip(), named, message.get("tool_call_id") or ""


def _arguments(value: Any) -> str:
    """Arguments in one spelling, be they an object or its JSON."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return value
    return json.dumps(value, sort_keys=True)


def find_chat(dialogues: Iterable[Dialogue], messages: Sequence[Any], tools: str) -> Dialogue | None:
    """The conversation that these messages (normal forms) continue: the longest, of those the latest."""
    found = None
    for dialogue in dialogues:
        have = dialogue.messages
        fits = have and len(have) < len(messages) and messages[: len(have)] == have and dialogue.tools == tools
        if fits and not dialogue.busy and (found is None or len(have) >= len(found.messages)):
            found = dialogue
    return found


def begin_chat(tokenizer: Tokenizer, messages: Messages, tools: Messages | None, version: int) -> Dialogue:
    """A new conversation.

    Raises:
        ValueError: with the template's words.
    """
    return Dialogue(
        Trajectory(opening(tokenizer, for_template(messages), tools).tolist(), version), tools=spelled(tools)
    )


def new_tokens(tokenizer: Tokenizer, dialogue: Dialogue, messages: Messages, tools: Messages | None) -> list[int]:
    """What is told to the policy before its next turn in a conversation that continues."""
    if not dialogue.messages:
        return []
    before = messages[: len(dialogue.messages) - 1]
    after = messages[len(dialogue.messages) :]
    last = dialogue.trajectory.tokens[-1]
    return continuation(tokenizer, for_template(before), for_template(after), last, tools).tolist()


def for_template(messages: Messages) -> Messages:
    """Messages as templates read them: content as text, the arguments of calls as objects."""
    found = []
    for message in messages:
        copy = dict(message) | {"content": plain(message.get("content"))}
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [_object_call(call) for call in calls]
        found.append(copy)
    return found


def _object_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = parse_json(function["arguments"])
    return call | {"function": function}


def spelled(tools: Any) -> str:
    """Tools in one spelling, "" for none."""
    return json.dumps(tools, sort_keys=True) if tools else ""


def find_text(
    dialogues: Iterable[Dialogue], prompt: str | Sequence[int]
) -> tuple[Dialogue, str | Sequence[int]] | None:
    """(the conversation that a prompt of text, or of tokens, continues; what is new in it)."""
    found = None
    for dialogue in dialogues:
        have: Any = dialogue.text if isinstance(prompt, str) else dialogue.trajectory.tokens
        if dialogue.messages or dialogue.busy or not have or len(have) > len(prompt) or prompt[: len(have)] != have:
            continue
        if found is None or len(have) >= found[0]:
            found = len(have), dialogue, prompt[len(have) :]
    return found and (found[1], found[2])


# ---- what is answered


def calls_in(text: str, at: int) -> tuple[str, list[dict[str, Any]]]:
    """(the text before the first call, the calls) of a turn that calls tools as Hermes' and Qwen's templates ask for.

    Args:
        at: for ids.
    """
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = msgspec.json.decode(found[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, UnicodeEncodeError, RecursionError):
            continue
        if isinstance(name, str):
            said = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(
                {"id": f"call_{at}_{len(calls)}", "type": "function", "function": {"name": name, "arguments": said}}
            )
    return (text[: text.index("<tool_call>")].rstrip() if calls else text), calls


def until(text: str, params: dict[str, Any]) -> str:
    """A turn's text up to the first of the strings that a request wanted to end it; the tokens keep what ended it."""
    stops = params.get("stop") or ()
    at = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return text[: min(at)] if at else text


def answer(text: str, whole: str, tools: bool, at: int) -> dict[str, Any]:
    """The assistant's message of a turn.

    Args:
        text: of the turn without special tokens.
        whole: with them, which the marks of a call are for some models.
        at: tokens of the conversation before it, of which the ids of its calls are made.
    """
    calls: list[dict[str, Any]] = []
    if tools:
        text, calls = next((found for found in (calls_in(text, at), calls_in(whole, at)) if found[1]), (text, calls))
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
