"""From what a row says to token ids: the prompt, and what is learned after it.

Invariants: a prompt's tokens are those of its own text, encoded alone, as an engine will see them; what is learned is
encoded apart from what stands before it, so a mask begins and ends between two tokens.  In a conversation the text
before an assistant's turn is, letter by letter, the prompt that the chat template makes of the messages before it, and
the turn ends with the token that ends a response: what is learned is what will be sampled.  A template, or a message,
for which that does not hold is refused; nothing is masked by guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.rollout.prompts.row_checks import ASSISTANT, Keys, Messages, PromptRow
from hpcrl.rollout.prompts.tokenizer import Tokenizer

LEARN = "step_loss_mask"  #: of an assistant's message: 0 leaves its turn out of the loss (slime's key)


@dataclass(frozen=True)
class ConversationPiece:
    """A piece of a conversation's text, and whether it is learned."""

    text: str
    learned: bool


def pieces(messages: Messages, tools: Sequence[Any] | None, template: Tokenizer) -> list[ConversationPiece]:
    """The conversation in pieces: the prompt of the first assistant's turn, that turn, what stands before the next, and
    so on.

    It ends with the last assistant's turn.

    Raises:
        ValueError: says which turn cannot be told apart, and why.
    """
    clean = [{key: value for key, value in message.items() if key != LEARN} for message in messages]
    ends = template.end_texts()
    whole = template.render(clean, False, tools)
    found: list[ConversationPiece] = []
    at = 0
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    for number in turns:
        before = template.render(clean[:number], True, tools)
        if not whole.startswith(before) or len(before) < at:
            raise ValueError(
                f"message {number + 1} cannot be told apart: the chat template renders a longer conversation without "
                "the prompt of this turn as its beginning; make the conversation end here, or learn from --label-key"
            )
        last = number == turns[-1]
        end = _end_of_turn(whole, len(before), ends, clean[number], number, last)
        found += [
            ConversationPiece(whole[at : len(before)], False),
            ConversationPiece(whole[len(before) : end], bool(messages[number].get(LEARN, 1))),
        ]
        at = end
    if not any(piece.learned for piece in found):
        raise ValueError(f"no message is left to learn: {LEARN} leaves all of them out")
    return found


def _end_of_turn(whole: str, start: int, ends: Sequence[str], message: dict[str, Any], number: int, last: bool) -> int:
    """Where the turn that begins at `start` ends: behind the first token that ends a response."""
    said = [str(message[key]).strip() for key in ("reasoning_content", "content") if message.get(key)]
    for text in ends:
        if any(text in part for part in said):
            raise ValueError(f"message {number + 1} holds {text}, the token that ends a turn")
    places = [place + len(text) for text in ends if (place := whole.find(text, start)) >= 0]
    if not places and not last:
        raise ValueError(
            f"the chat template ends message {number + 1} with no end-of-sequence token "
            f"({', '.join(ends) or 'the model has none'}): the end of the turn is unknown"
        )
    end = min(places, default=len(whole))
    turn = whole[start:end]
    for part in said:
        if part not in turn:
            raise ValueError(
                f"the chat template leaves out a part of message {number + 1} (a thought, usually, when another turn "
                "follows); make the conversation end with this turn, or take the thought out"
            )
    return end


# ---- rows


@dataclass(frozen=True)
class RenderedRow:
    """The text of a prompt, and of the responses to learn after it, in pieces: a conversation has one."""

    prompt: str
    targets: tuple[tuple[ConversationPiece, ...], ...] = ()


@dataclass(frozen=True)
class EncodedRow:
    """One row of a prompt file as token ids.

    Attributes:
        prompt: int32 [prompt].
        targets: int32 [response] each.
        mask: uint8 [response], which tokens of the first target are learned.
    """

    prompt: np.ndarray
    targets: tuple[np.ndarray, ...] = ()
    mask: np.ndarray | None = None

    @property
    def total(self) -> int:
        return len(self.prompt) + max(map(len, self.targets), default=0)


def render(row: PromptRow, keys: Keys, tokenizer: Tokenizer) -> RenderedRow:
    """The texts of a row.

    Raises:
        ValueError: if the chat template refuses it, or its turns cannot be told apart.
    """
    if row.messages is not None and keys.conversation:
        first, *rest = pieces(row.messages, row.tools, tokenizer)
        return RenderedRow(first.text, (tuple(rest),))
    text = str(row.text) if row.messages is None else tokenizer.render(row.messages, True, row.tools)
    said = [tokenizer.target(row.messages, text, str(label), row.tools) for label in row.learned]
    return RenderedRow(text, tuple((ConversationPiece(one, True),) for one in said))


def encode(texts: Sequence[RenderedRow], tokenizer: Tokenizer) -> list[EncodedRow]:
    """The tokens of each, encoded in one call; a target ends with an end-of-sequence token."""
    prompts = tokenizer.encode([text.prompt for text in texts])
    ids = iter(tokenizer.encode([piece.text for text in texts for target in text.targets for piece in target]))
    found = []
    for text, prompt in zip(texts, prompts, strict=True):
        targets, masks = [], []
        for target in text.targets:
            parts = [next(ids) for _ in target]
            parts[-1] = tokenizer.ended(parts[-1])
            targets.append(np.concatenate(parts))
            masks.append(np.repeat(np.array([piece.learned for piece in target], np.uint8), [*map(len, parts)]))
        found.append(EncodedRow(prompt, tuple(targets), masks[0] if masks else None))
    return found
