"""From what a row says to token ids: the prompt, and what is learned after it.

Invariant: a prompt's tokens are those of its own text, encoded alone, as an engine will see them; what is learned is
encoded apart from what stands before it, so a mask begins and ends between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcrl.prompt_files.row_checks import Keys, Row
from hpcrl.rollout.prompts.conversations import Piece, pieces
from hpcrl.rollout.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rendered:
    """The text of a prompt; the responses to learn after it; or the pieces of a conversation that follow."""

    prompt: str
    targets: tuple[str, ...] = ()
    turns: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """prompt: int32 [prompt]; targets: int32 [response] each; mask: uint8 [response] of a conversation's one target."""

    prompt: np.ndarray
    targets: tuple[np.ndarray, ...] = ()
    mask: np.ndarray | None = None

    @property
    def total(self) -> int:
        return len(self.prompt) + max(map(len, self.targets), default=0)


def render(row: Row, keys: Keys, tokenizer: Tokenizer) -> Rendered:
    """The texts of a row.  ValueError if the chat template refuses it, or its turns cannot be told apart."""
    if row.messages is None:
        text = str(row.text)
        return Rendered(text, tuple(tokenizer.target(None, text, str(label)) for label in row.learned))
    if keys.conversation:
        first, *rest = pieces(row.messages, row.tools, tokenizer)
        return Rendered(first.text, (), tuple(rest))
    text = tokenizer.render(row.messages, True, row.tools)
    return Rendered(text, tuple(tokenizer.target(row.messages, text, str(label), row.tools) for label in row.learned))


def encode(texts: Sequence[Rendered], tokenizer: Tokenizer) -> list[Tokens]:
    """The tokens of each, all encoded at once."""
    prompts = tokenizer.encode([text.prompt for text in texts])
    targets = iter(tokenizer.targets([target for text in texts for target in text.targets]))
    turns = iter(tokenizer.encode([piece.text for text in texts for piece in text.turns]))
    found = []
    for text, prompt in zip(texts, prompts, strict=True):
        if text.turns:
            found.append(Tokens(prompt, *_joined(text.turns, [next(turns) for _ in text.turns], tokenizer)))
        else:
            found.append(Tokens(prompt, tuple(next(targets) for _ in text.targets)))
    return found


def _joined(
    turns: Sequence[Piece], ids: list[np.ndarray], tokenizer: Tokenizer
) -> tuple[tuple[np.ndarray], np.ndarray]:
    """The pieces of a conversation as one target, and which of its tokens are learned."""
    ids[-1] = tokenizer.ended(ids[-1])
    mask = np.concatenate([np.full(len(part), piece.learned, np.uint8) for piece, part in zip(turns, ids, strict=True)])
    return (np.concatenate(ids),), mask
