"""What is asked of an engine: some samples of one prompt.

Invariant: every sample asked for gets exactly one answer, a completion or an error, however often it was sent; a
request is a pure function of its body, so sending it twice is safe.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.engines.engine_pool import PooledEngine
from hpcrl.rollout.engines.sampling import Sampling

_NUMBERS = itertools.count()


@dataclass(eq=False)
class Call:
    """One sample that somebody waits for.

    ident: its name at engines; engine, request: that it was sent to, and with, last; flying: whether it is in flight
    there; ended: somebody asked for its early end; moved: it was ended to go on at another engine.
    """

    seed: int | None
    answer: asyncio.Future[Completion]
    ident: str = field(default_factory=lambda: f"{os.getpid():x}-{next(_NUMBERS):x}")
    engine: PooledEngine | None = None
    request: Request | None = None
    flying: bool = False
    ended: bool = False
    moved: bool = False


@dataclass(eq=False)
class Request:
    """Samples of one prompt (int32 [n]) under one way of sampling.

    begun: tokens at the end of `prompt` that are the response's own; max_tokens: that may still come; exact: whether
    nothing else bounds the response; tries: how often it was sent before; task: that serves it.
    """

    prompt: np.ndarray
    sampling: Sampling
    begun: int
    max_tokens: int
    exact: bool
    version: int
    affinity: str | None
    calls: list[Call]
    tries: int = 0
    task: asyncio.Task[None] | None = None

    def part(self, calls: list[Call], tries: int | None = None) -> Request:
        """The same, for some of its calls."""
        tries = self.tries if tries is None else tries
        return Request(
            self.prompt,
            self.sampling,
            self.begun,
            self.max_tokens,
            self.exact,
            self.version,
            self.affinity,
            calls,
            tries,
        )

    def open(self) -> list[Call]:
        """The calls that still wait for an answer."""
        return [call for call in self.calls if not call.answer.done()]


#: what a route does with each answer
Deliver = Callable[[Call, Completion], None]


class PassingTrouble(Exception):
    """A request failed in a way that says nothing about the request: it may be sent again."""
