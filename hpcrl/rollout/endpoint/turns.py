"""The next turn of a conversation, whatever protocol it was asked for in.

Invariants: a protocol's route translates what it is asked into a `ChatRequest` and formats the `ChatAnswer`; which
conversation continues, what is encoded and what is kept of the turn is decided here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.rollout.endpoint import chat
from hpcrl.rollout.endpoint.chat import Dialogue
from hpcrl.rollout.endpoint.session import DIALOGUES, FULL, FULL_WORDS, BadRequest, Session
from hpcrl.rollout.prompts.tokenizer import Messages
from hpcrl.rollout.samplers.trajectory import LENGTH, Trajectory, Turn

MODEL = "policy"  #: the one model's name


@dataclass(frozen=True)
class ChatRequest:
    """A chat whose next message is asked for.

    Attributes:
        messages, tools: as OpenAI has them.
        params: max_new_tokens and stop.
        calls: whether calls of tools are looked for in the answer.
    """

    messages: Messages
    tools: Messages | None = None
    params: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    calls: bool = True


@dataclass(frozen=True)
class ChatAnswer:
    """That message.

    Attributes:
        message: as OpenAI has it.
        finish: STOP or LENGTH.
        stop: the string of the request that ended it, or None.
        before: tokens that the policy was asked with.
    """

    message: dict[str, Any]
    finish: str
    stop: str | None
    before: int
    turn: Turn


def place(session: Session, asked: ChatRequest) -> tuple[Dialogue, list[int], list[Any]]:
    """(the conversation that a chat continues, or a new one; the tokens that the policy reads next; the normal forms).

    Raises:
        BadRequest: if they are not messages, or the chat template refuses them.
    """
    tokenizer, messages, tools = session.tokenizer, asked.messages, asked.tools
    try:
        forms = [chat.normal(message) for message in messages]
        found = chat.find_chat(session.dialogues, forms, chat.render_tools(tools))
        dialogue = found or chat.begin_chat(tokenizer, messages, tools, session.making.version)
        return dialogue, chat.new_tokens(tokenizer, dialogue, messages, tools), forms
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def say(session: Session, asked: ChatRequest) -> ChatAnswer:
    """The policy's next message in a chat.

    Raises:
        BadRequest: if it cannot be asked for.
        HpcrlError: an engine failed.
    """
    dialogue, told, forms = place(session, asked)
    before = len(dialogue.trajectory.tokens) + len(told)
    turn = await take_turn(session, dialogue, told, asked.params, asked.logprobs)
    clean, stop = chat.ended_by(session.text(turn.tokens, skip_special=True), asked.params)
    whole, _ = chat.ended_by(turn.text, asked.params)
    tools = asked.tools if asked.calls else None
    message = chat.answer(chat.call_form(session.tokenizer), clean, whole, tools, before)
    dialogue.messages = [*forms, chat.normal(message)]
    return ChatAnswer(message, turn.finish, stop, before, turn)


async def complete(
    session: Session, prompt: str | Sequence[int], params: dict[str, Any], logprobs: bool
) -> tuple[str, int, Turn]:
    """(the text that the policy says after a prompt, tokens that it was asked with, the turn).

    Raises:
        BadRequest: if it cannot be asked for.
        HpcrlError: an engine failed.
    """
    found = chat.find_text(session.dialogues, prompt)
    new = prompt if found is None else found[1]
    told = session.tokenizer.encode([new])[0].tolist() if isinstance(new, str) else list(new)
    dialogue = found[0] if found else Dialogue(Trajectory(told, session.making.version))
    told = told if found else []
    before = len(dialogue.trajectory.tokens) + len(told)
    turn = await take_turn(session, dialogue, told, params, logprobs)
    text = session.text(turn.tokens, skip_special=True)
    if isinstance(prompt, str):
        dialogue.text = prompt + text if text else ""  # an answer of nothing is not continued by the same prompt
    return chat.ended_by(text, params)[0], before, turn


async def take_turn(
    session: Session, dialogue: Dialogue, told: list[int], params: dict[str, Any], logprobs: bool
) -> Turn:
    """The next turn of a conversation, which has it afterwards."""
    trajectory = dialogue.trajectory
    known = any(dialogue is other for other in session.dialogues)
    if not known and len(session.dialogues) >= DIALOGUES:
        raise BadRequest(f"more than {DIALOGUES} conversations in one response", "rate_limit_exceeded")
    room = session.making.sampling.max_tokens - trajectory.response_length - len(told)
    dialogue.busy = True
    try:
        if room < 1:
            used = f"the {session.making.sampling.max_tokens} tokens of --rollout-max-response-len are used up"
            raise BadRequest(f"{FULL_WORDS} reached: {used}", FULL)
        most = min(room, params.get("max_new_tokens", room))
        turn = await session.sample_turn([*trajectory.tokens, *told], params | {"max_new_tokens": most}, logprobs)
    except BadRequest as error:
        if error.code == FULL:
            trajectory.finish = LENGTH
        raise
    finally:
        dialogue.busy = False
    trajectory.add_observed(told)
    trajectory.add_sampled(turn)
    if not known:
        session.dialogues.append(dialogue)
    return turn
