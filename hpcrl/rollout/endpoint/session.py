"""One response in the making: only the holder of its key may use the engines.

Invariants: every token is sampled as the run samples (temperature, top-p and their like are the run's, whatever is
asked for), so that it can be trained on; the noise of a request depends on the response and on the tokens asked with,
not on the order in which requests come; an engine's failure is kept and ends the run, a bad request is the asker's
error alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.rollout.endpoint.chat import Dialogue
from hpcrl.rollout.endpoint.recorded_turns import AskedTurn, history_of
from hpcrl.rollout.engines.completion import Sampling, seed_of
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.trajectory import LENGTH, STOP, Turn
from hpcrl.utils.sample_parts import ABORTED, TRUNCATED

SIDE_BY_SIDE = 64  #: requests of one response at once
REQUESTS = 4096  #: requests of one response in all
DIALOGUES = 256  #: conversations of one response
RECENT = 16  #: turns among whose histories that is looked for which a request continues


#: the code of a request that leaves no room, and the words that clients look for in its message, as in OpenAI's own:
#: they then give up a conversation and do not ask again
FULL = "context_length_exceeded"
FULL_WORDS = "this model's maximum context length is"


class BadRequest(Exception):
    """What was asked for cannot be done.

    Attributes:
        code: as OpenAI's servers call it.
    """

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class ResponseContext:
    """What a session needs to know of the response that is made.

    Attributes:
        seed: what its noise depends on.
        version: the policy's.
    """

    sampling: Sampling
    seed: tuple[object, ...]
    version: int


@dataclass
class Session:
    """The engines, for one response.

    Attributes:
        broken: the error of ours that ends the run.
        ended: the run ended the response early.
        in_flight: requests that engines work on.
        turns: what it was answered, in the order of the requests.
    """

    making: ResponseContext
    client: EngineClient
    tokenizer: Tokenizer
    context: Callable[[], int | None]
    turns: list[AskedTurn] = field(default_factory=list)
    dialogues: list[Dialogue] = field(default_factory=list)
    broken: HpcrlError | None = None
    ended: bool = False
    in_flight: int = 0
    requests: int = 0
    _requests: Counter[bytes] = field(default_factory=Counter)
    _numbers: list[int] = field(default_factory=list)

    async def sample_turn(self, tokens: Sequence[int], params: Mapping[str, Any], logprobs: bool = False) -> Turn:
        """The policy's turn after `tokens`, in at most params["max_new_tokens"] tokens, ended by params["stop"] too.

        Args:
            logprobs: whether the asker wants them; a training sample has them anyway.

        Raises:
            BadRequest: if they are not tokens of the model, or leave no room for an answer.
            HpcrlError: an engine failed.
        """
        ids = self._checked(tokens)
        sampling = _changed(self.making.sampling, params)
        sampling = replace(sampling, logprobs=sampling.logprobs or logprobs)
        if (context := self.context()) is not None and len(ids) >= context:
            raise BadRequest(f"{FULL_WORDS} {context} tokens, and {len(ids)} leave no room for an answer", FULL)
        if self.in_flight >= SIDE_BY_SIDE or self.requests >= REQUESTS:
            raise BadRequest(
                f"more than {SIDE_BY_SIDE} requests at once, or {REQUESTS} in all, for one response",
                "rate_limit_exceeded",
            )
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        seed = None
        if sampling.temperature > 0:
            seed = seed_of(*self.making.seed, digest.hex(), self._requests[digest])
        self._requests[digest] += 1
        number = self.requests
        self.in_flight, self.requests = self.in_flight + 1, number + 1
        try:
            # all turns go to the engine that has their beginning in its cache
            affinity = "/".join(map(str, self.making.seed))
            found = await self.client.complete(ids, sampling, seed, self.making.version, None, affinity)
        except HpcrlError as error:
            self.broken = self.broken or error
            raise
        finally:
            self.in_flight -= 1
        if found.status == ABORTED:
            self.ended = True
            raise BadRequest("the response was ended early: it is not needed any more", "ended_early")
        recent = dict.fromkeys(turn.history for turn in self.turns[: -RECENT - 1 : -1])
        at = bisect(self._numbers, number)
        self._numbers.insert(at, number)
        self.turns.insert(at, history_of(ids, recent).grow(ids, found))
        finish = LENGTH if found.status == TRUNCATED else STOP
        return Turn(found.tokens, found.logprobs, found.versions, finish, self.text(found.tokens))

    def text(self, tokens: np.ndarray, skip_special: bool = False) -> str:
        """A turn's text, without the token that ended it.

        Args:
            skip_special: nor any special token.
        """
        return self.tokenizer.decode(tokens, frozenset(self.making.sampling.stop_token_ids), skip_special)

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        if not len(tokens):
            raise BadRequest("no tokens were given")
        bad = [t for t in tokens if type(t) is not int or not 0 <= t < self.tokenizer.vocab_size]
        if bad:
            raise BadRequest(f"{bad[0]!r:.80} is not a token id below {self.tokenizer.vocab_size}")
        return np.asarray(tokens, np.int32)


def _changed(sampling: Sampling, params: Mapping[str, Any]) -> Sampling:
    """The run's sampling with what a request may change: shorter answers and more strings or ids that end them."""
    changes: dict[str, Any] = {}
    known = sampling_params(sampling)
    for name, value in params.items():
        if name not in known:
            raise BadRequest(f"sampling_params has {name!r}: there are {', '.join(known)}")
        if value is None or value == known[name]:
            continue
        if name == "max_new_tokens":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"max_new_tokens {value!r} is not a number of tokens")
            changes["max_tokens"] = min(value, sampling.max_tokens)
        elif name in ("stop", "stop_token_ids"):
            kind = str if name == "stop" else int
            values = [value] if isinstance(value, kind) else list(value) if isinstance(value, list | tuple) else [None]
            if not all(isinstance(v, kind) and v != "" for v in values) or len(values) > 64:
                raise BadRequest(f"{name} {value!r} is not a list of {kind.__name__}")
            own = getattr(sampling, name)
            changes[name] = (*own, *(v for v in values if v not in own))
        else:
            raise BadRequest(
                f"sampling_params changes {name} to {value!r}: tokens that are sampled otherwise than the run's "
                "options say cannot be trained on; set it by the option"
            )
    return replace(sampling, **changes)


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The run's sampling in the words that a custom function gets it in."""
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return found | {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p") if hasattr(sampling, name)}
