"""Conversations of askers that know messages and text alone: which request continues which, and what it adds.

Invariants: a request continues a conversation if it begins with all of that one's messages (or its whole text, or
tokens); then only what is new is encoded, and the policy's turns keep the tokens that were sampled.  Any other request
begins a conversation of its own, whose earlier turns, if it has some, are prompt: not learned from.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.rollout.endpoint.call_forms import CallForm, form_of
from hpcrl.rollout.endpoint.call_values import FoundCall
from hpcrl.rollout.prompts.tokenizer import Messages, Tokenizer
from hpcrl.rollout.samplers.trajectory import Trajectory, continuation, opening, plain
from hpcrl.utils.untrusted_files import parse_json

#: roles that chat templates have another word for
_ROLES = {"developer": "system"}


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
        ValueError: if it is not a message.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ValueError("a message is not an object with a role")
    calls = message.get("tool_calls") or []
    try:
        named = tuple((c["function"]["name"], _arguments(c["function"].get("arguments"))) for c in calls)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("tool_calls is not a list of calls of functions") from None
    text = plain(message.get("content"))
    if role == "assistant":
        if isinstance(thought := message.get("reasoning_content"), str) and thought:
            text = f"<think>{thought}</think>{text}"  # some clients take it apart, and send both parts back
        text = text.strip()
    return role, text, named, message.get("tool_call_id") or "", message.get("name") or ""


def _arguments(value: Any) -> str:
    """Arguments in one spelling, whether they come as an object or as its JSON."""
    if isinstance(value, str) and value:
        try:
            value = parse_json(value)
        except ValueError:
            return value
    return json.dumps(_whole(value or {}), sort_keys=True)


def _whole(value: Any) -> Any:
    """A value of JSON with each number that is whole as an integer: JavaScript has one spelling of 1 and 1.0."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    shown = for_template(messages, call_form(tokenizer))
    return Dialogue(Trajectory(opening(tokenizer, shown, tools).tolist(), version), tools=render_tools(tools))


def new_tokens(tokenizer: Tokenizer, dialogue: Dialogue, messages: Messages, tools: Messages | None) -> list[int]:
    """The tokens that the policy reads before its next turn in a conversation that continues.

    Raises:
        ValueError: if the template refuses the messages.
    """
    if not dialogue.messages:
        return []
    shown = for_template(messages, call_form(tokenizer))
    at = len(dialogue.messages)
    before, said, after = shown[: at - 1], shown[at - 1], shown[at:]
    last = dialogue.trajectory.tokens[-1]
    return continuation(tokenizer, before, after, last, tools, said.get("tool_calls")).tolist()


def call_form(tokenizer: Tokenizer) -> CallForm:
    """The form of tool calls that the model's template shows."""
    return form_of(tokenizer.template)


def for_template(messages: Messages, form: CallForm) -> Messages:
    """Messages as templates read them: content as text, the arguments of calls as objects, and no list of calls where
    there are none.  DeepSeek's read arguments as JSON text, and R1's writes calls only where there is no content."""
    found = []
    for message in messages:
        copy = dict(message) | {"content": plain(message.get("content"))}
        copy["role"] = _ROLES.get(copy["role"], copy["role"])
        calls = copy.pop("tool_calls", None)
        if calls:
            copy["tool_calls"] = [_shown_call(call, form.as_text) for call in calls]
            copy["content"] = None if form.as_text and not copy["content"] else copy["content"]
        found.append(copy)
    return found


def _shown_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if as_text:
        function["arguments"] = arguments if isinstance(arguments, str) and arguments else json.dumps(arguments or {})
    elif not arguments:
        function["arguments"] = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            function["arguments"] = parse_json(arguments)
    return {"type": "function"} | call | {"function": function}


def render_tools(tools: Any) -> str:
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


def ended_by(text: str, params: dict[str, Any]) -> tuple[str, str | None]:
    """(a turn's text up to the first of the strings that a request wanted to end it, that string or None); the tokens
    keep what ended it."""
    stops = params.get("stop") or ()
    at = [(text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return (text[: min(at)[0]], min(at)[1]) if at else (text, None)


def _split(form: CallForm, text: str, tools: Sequence[Any]) -> tuple[str, list[FoundCall]]:
    """The text of a turn and its calls, which stand behind what the policy thinks: in there they are none."""
    thought, mark, said = text.rpartition("</think>")
    left, calls = form.split(said, tools)
    return f"{thought}{mark}{left}", calls


def answer(form: CallForm, text: str, whole: str, tools: Sequence[Any] | None, at: int) -> dict[str, Any]:
    """The assistant's message of a turn.

    Args:
        text: of the turn without special tokens.
        whole: with them, which the marks of a call are for some models.
        tools: of the request, if the turn may call them.
        at: tokens of the conversation before it; they number its calls where the model writes no ids.
    """
    said, calls = _split(form, text, tools) if tools else (text, [])
    if tools and not calls and whole != text:
        said, calls = _split(form, whole, tools)
    if not calls:
        return {"role": "assistant", "content": text}
    found, ids = [], set[str]()
    for number, call in enumerate(calls):
        name = call.id if call.id and call.id not in ids else f"call_{at}_{number}"
        ids.add(name)
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        found.append({"id": name, "type": "function", "function": function})
    return {"role": "assistant", "content": said, "tool_calls": found}
