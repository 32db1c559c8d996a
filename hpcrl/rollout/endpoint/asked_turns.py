"""The turns of one response: what the policy was asked with, what it said, and the experts that its engine chose.

Invariants: a conversation takes memory for each of its tokens once, and for the experts of each once.  The experts of a
token are those of the turn that sampled it, whose log-prob came of them, or, of the last token of a turn and of what
the policy was told, those of the turn that read it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from hpcrl.rollout.engines.completion import Completion, completion_of
from hpcrl.sample import Sample


@dataclass(frozen=True, eq=False)
class AskedTurn:
    """One turn of a conversation at the endpoint.

    Attributes:
        added: int32 tokens that the policy was asked with, behind `shared` tokens of the request and answer `before`.
        answer: what it said, ABORTED if that was ended early; without its experts.
        number: of the request in its response.
        experts: uint8 [tokens that were read - known, layers, bytes] (see `sample.OPTIONAL`), of those behind the
            `known` first, whose experts are those of `before`; None where no experts were asked for, or nothing was
            said.
    """

    added: np.ndarray
    answer: Completion
    before: AskedTurn | None = None
    shared: int = 0
    number: int = 0
    experts: np.ndarray | None = None
    known: int = 0

    @property
    def length(self) -> int:
        """Tokens that the policy was asked with."""
        return self.shared + len(self.added)

    @property
    def tokens(self) -> np.ndarray:
        """All of them, put together."""
        pieces, turn, need = [self.added], self.before, self.shared
        while turn is not None and need:
            if need > turn.length:
                pieces.append(turn.answer.tokens[: need - turn.length])
                need = turn.length
            if need > turn.shared:
                pieces.append(turn.added[: need - turn.shared])
                need = turn.shared
            turn = turn.before
        return np.concatenate(pieces[::-1])

    def alike(self, ids: np.ndarray) -> int:
        """With how many tokens of this request and its answer others begin."""
        whole = np.concatenate([self.tokens, self.answer.tokens])[: len(ids)]
        equal = whole == ids[: len(whole)]
        return len(whole) if equal.all() else int(np.argmin(equal))

    @property
    def read(self) -> int:
        """Tokens of the request and its answer whose experts are known, from the first on."""
        return self.known + (0 if self.experts is None else len(self.experts))

    def choices(self, count: int) -> np.ndarray:
        """The experts of the first `count` of them, at most `read` and at least one."""
        pieces: list[np.ndarray] = []
        turn: AskedTurn | None = self
        while turn is not None and count:
            if turn.experts is not None and count > turn.known:
                pieces.append(turn.experts[: count - turn.known])
                count = turn.known
            turn = turn.before
        return np.concatenate(pieces[::-1])

    def spoken(self, turns: Iterable[AskedTurn]) -> Completion:
        """The answer with its experts, unless one of `turns` has read all of the same tokens and more."""
        if self.experts is None or any(
            other.before is self and other.shared >= self.read and other.read > self.read for other in turns
        ):
            return self.answer
        return replace(self.answer, experts=self.choices(self.read))

    @classmethod
    def of(cls, sample: Sample) -> AskedTurn:
        """A turn that `Session.samples` has kept."""
        answer = completion_of(sample)
        asked = sample.tokens[: len(sample.tokens) - sample.response_length]
        return cls(asked, replace(answer, experts=None), experts=answer.experts)


def choices_of(tokens: np.ndarray, turns: Iterable[AskedTurn]) -> np.ndarray | None:
    """The experts of tokens, uint8 [tokens, layers, bytes], from the first of the turns that has read them all.

    None if there is none: the policy was not asked with exactly these.
    """
    for turn in turns:
        if 0 < len(tokens) <= turn.read and turn.alike(tokens) == len(tokens):
            return turn.choices(len(tokens))
    return None
