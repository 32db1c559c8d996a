"""A conversation to learn from: its text, cut into what the assistant said and what stood around it.

Invariant: the text before an assistant's turn is, letter by letter, the prompt that the chat template makes of the
messages before it, and the turn ends with the token that ends a response: so what is learned is what will be sampled.
A template, or a message, for which that does not hold is refused; nothing is masked by guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.prompt_files.row_checks import ASSISTANT, Messages

LEARN = "step_loss_mask"  #: of an assistant's message: 0 leaves its turn out of the loss (slime's key)


class Template(Protocol):
    """What a conversation needs of a tokenizer."""

    def render(self, messages: Messages, generation: bool, tools: Sequence[Any] | None = None) -> str: ...

    def end_texts(self) -> list[str]:
        """The text of each token that ends a response."""
        ...


@dataclass(frozen=True)
class Piece:
    """A piece of a conversation's text, and whether it is learned."""

    text: str
    learned: bool


def pieces(messages: Messages, tools: Sequence[Any] | None, template: Template) -> list[Piece]:
    """The conversation in pieces: the prompt of the first assistant's turn, that turn, what stands before the next, and
    so on.

    It ends with the last assistant's turn.  ValueError says which turn cannot be told apart, and why.
    """
    clean = [{key: value for key, value in message.items() if key != LEARN} for message in messages]
    ends = template.end_texts()
    whole = template.render(clean, False, tools)
    found: list[Piece] = []
    at = 0
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    for number in turns:
        before = template.render(clean[:number], True, tools)
        if not whole.startswith(before) or len(before) < at:
            raise ValueError(
                f"message {number + 1} cannot be told apart: the chat template does not begin a conversation that goes on with the "
                "prompt of this turn; make the conversation end here, or learn from --label-key"
            )
        last = number == turns[-1]
        end = _end(whole, len(before), ends, clean[number], number, last)
        found += [
            Piece(whole[at : len(before)], False),
            Piece(whole[len(before) : end], bool(messages[number].get(LEARN, 1))),
        ]
        at = end
    if not any(piece.learned for piece in found):
        raise ValueError(f"no message is left to learn: {LEARN} leaves all of them out")
    return found


def _end(whole: str, start: int, ends: Sequence[str], message: dict[str, Any], number: int, last: bool) -> int:
    """Where the turn that begins at `start` ends: behind the first token that ends a response."""
    said = [str(message[key]).strip() for key in ("reasoning_content", "content") if message.get(key)]
    for text in ends:
        if any(text in part for part in said):
            raise ValueError(f"message {number + 1} holds {text}, the token that ends a turn")
    places = [place + len(text) for text in ends if (place := whole.find(text, start)) >= 0]
    if not places and not last:
        raise ValueError(
            f"the chat template ends message {number + 1} with no end-of-sequence token ({', '.join(ends) or 'the model has none'}): "
            "where the turn ends cannot be told"
        )
    end = min(places, default=len(whole))
    turn = whole[start:end]
    for part in said:
        if part not in turn:
            raise ValueError(
                f"the chat template leaves out a part of message {number + 1} (a thought, usually, when another turn follows); "
                "make the conversation end with this turn, or take the thought out"
            )
    return end
