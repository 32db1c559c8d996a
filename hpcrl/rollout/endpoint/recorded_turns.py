"""The turns of one response: what the policy was asked with, what it said, and the experts that its engine chose.

Invariants: a conversation that only grows takes memory for each of its tokens, and for the experts of each, once; one
that leaves it takes a copy.  The experts of a token are those of the turn that sampled it, whose log-prob came of them,
or, of the last token of a turn and of what the policy was told, those of the turn that read it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from hpcrl.rollout.engines.completion import Completion


def alike(first: np.ndarray, second: np.ndarray) -> int:
    """With how many of the same tokens both begin."""
    length = min(len(first), len(second))
    equal = first[:length] == second[:length]
    return length if equal.all() else int(np.argmin(equal))


@dataclass(eq=False)
class History:
    """Tokens that the policy was asked with, each time with more, and what it said between them.

    Attributes:
        tokens: int32, of all.
        experts: uint8 [tokens, layers, bytes] (see `sample.OPTIONAL`), in pieces, of the first `read` of them.
    """

    tokens: np.ndarray
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Tokens whose experts are known, from the first on."""
        return sum(map(len, self.experts))

    def choices(self, count: int) -> np.ndarray:
        """The experts of the first `count` tokens, of at least one."""
        return np.concatenate(self.experts)[:count]

    def grow(self, ids: np.ndarray, said: Completion) -> AskedTurn:
        """Add a turn whose request was `ids`; they begin with all tokens of this history."""
        if said.experts is not None and len(said.experts) > self.read:
            self.experts.append(said.experts[self.read :].copy())
        self.tokens = np.concatenate([ids, said.tokens])
        return AskedTurn(self, len(ids), replace(said, experts=None))


@dataclass(frozen=True, eq=False)
class AskedTurn:
    """One turn of a conversation at the endpoint.

    Attributes:
        length: tokens that the policy was asked with.
        answer: what it said, without its experts.
    """

    history: History
    length: int
    answer: Completion

    @property
    def tokens(self) -> np.ndarray:
        """All that it was asked with."""
        return self.history.tokens[: self.length]


def history_of(ids: np.ndarray, known: Iterable[History]) -> History:
    """The one that begins `ids`, or a new one, with a copy of what it shares with the one most like it."""
    shared, best = 0, None
    for history in known:
        if (same := alike(history.tokens, ids)) > shared:
            shared, best = same, history
    if best is not None and shared == len(best.tokens):
        return best
    read = min(shared, best.read) if best is not None else 0
    return History(ids[:shared], [best.choices(read).copy()] if best is not None and read else [])


def choices_of(tokens: np.ndarray, turns: Iterable[AskedTurn]) -> np.ndarray | None:
    """The experts of tokens, uint8 [tokens, layers, bytes], from the first history that has read them all.

    None if there is none: the policy was not asked with exactly these.
    """
    for history in dict.fromkeys(turn.history for turn in turns):
        if 0 < len(tokens) <= history.read and alike(history.tokens, tokens) == len(tokens):
            return history.choices(len(tokens))
    return None
