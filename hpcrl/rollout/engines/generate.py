"""One sample: a prompt's token ids to an engine, token ids with log-probs and policy versions back.

Invariant: every token of a sample is within the vocabulary, has a finite log-prob at the sampling temperature, and
knows the policy version that it was sampled under; an engine that answers anything else is named in the error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError, PeerError
from hpcrl.rollout.engines.engine_pool import EnginePool, PooledEngine
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.sample import ABORTED, COMPLETED, TRUNCATED, Sample

PATH = "/inference/v1/generate"
STATUS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}
ABORTS = 3  #: how often a sample that an engine aborts is begun again
CLAMPED = -9999.0  #: what vLLM writes for a log-prob that is not finite, or that it does not have


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    """Output tokens [start, end) were sampled under the weights called `version`."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True)
class Completion:
    """What an engine answered.  tokens: int32, logprobs: float32 (zeros if not asked for), versions: int32, all [response]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: str

    def sample(self, group: int, index: int, prompt: Prompt, response: str) -> Sample:
        """This as the answer number `index` to `prompt`; response: its text."""
        return Sample(
            group=group,
            index=index,
            tokens=np.concatenate([prompt.tokens, self.tokens]),
            response_length=len(self.tokens),
            loss_mask=np.ones(len(self.tokens), np.uint8),
            logprobs=self.logprobs,
            versions=self.versions,
            status=self.status,
            prompt=prompt.raw,
            response=response,
            label=prompt.label,
            metadata=prompt.metadata,
        )


@dataclass(frozen=True)
class Sampling:
    """How to sample.  max_tokens: of a response at most; logprobs: whether they are wanted."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: bool = True
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, options: Options, tokenizer: Tokenizer, evaluation: bool = False) -> Sampling:
        """As the options ask for.  The model's end-of-sequence ids always stop: an engine may know but one of them."""
        temperature, length = options.rollout_temperature, options.rollout_max_response_len
        stops = tuple(sorted({*options.rollout_stop_token_ids, *tokenizer.eos_ids}))
        return cls(temperature, length, tuple(options.rollout_stop), stops, logprobs=not evaluation)

    def params(self, seed: int | None, room: int | None) -> dict[str, Any]:
        """vLLM's SamplingParams; `room`: tokens that the engine's context leaves for the response."""
        params: dict[str, Any] = {
            "n": 1,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens if room is None else min(self.max_tokens, room),
            "stop_token_ids": list(self.stop_token_ids),
            "detokenize": bool(self.stop),
        }
        if self.stop:
            params["stop"] = list(self.stop)
        if self.top_p < 1:
            params["top_p"] = self.top_p
        if self.top_k > 0:
            params["top_k"] = self.top_k
        if self.min_p > 0:
            params["min_p"] = self.min_p
        if self.min_tokens > 0:
            params["min_tokens"] = self.min_tokens
        if self.repetition_penalty != 1:
            params["repetition_penalty"] = self.repetition_penalty
        if self.logprobs:
            params["logprobs"] = 0  # of the sampled token alone
        if seed is not None:
            params["seed"] = seed
        return params


def seed_of(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on `parts` alone, whatever the process or machine (BLAKE2b of their text)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Generator:
    """Samples responses from the engines."""

    def __init__(self, pool: EnginePool, vocab_size: int) -> None:
        self._pool, self._vocab_size = pool, vocab_size

    async def complete(self, prompt: np.ndarray, sampling: Sampling, seed: int | None, version: int) -> Completion:
        """One response to `prompt` (int32 token ids), asked for under policy `version`.

        PeerError names the engine whose answer is none, or that aborts again and again; DataError if the engine's
        context leaves no room for a response.
        """
        room = None if self._pool.model_len is None else self._pool.model_len - len(prompt)
        if room is not None and room < 1:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in the engine's context of {self._pool.model_len}",
                "raise --rollout-max-context-len",
            )
        body = {"model": "policy", "token_ids": prompt.tolist(), "sampling_params": sampling.params(seed, room)}
        for _ in range(ABORTS):
            engine, data = await self._pool.post(PATH, body)
            completion = self._read(engine, data, sampling.logprobs, version)
            if completion.status != ABORTED:
                return completion
        raise PeerError(f"{engine} aborted one request {ABORTS} times", f"see {engine.log}")

    def _read(self, engine: PooledEngine, data: bytes, logprobs: bool, version: int) -> Completion:
        try:
            answer = _DECODER.decode(data)
            choice = answer.choices[0]
            status = STATUS[choice.finish_reason]
        except (msgspec.MsgspecError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise _garbage(engine, f"what is no completion: {type(error).__name__}: {error}") from error
        if status == ABORTED:
            return Completion(*(np.zeros(0, kind) for kind in (np.int32, np.float32, np.int32)), ABORTED)
        tokens = self._tokens(engine, choice.token_ids)
        probs = _logprobs(engine, choice) if logprobs else np.zeros(len(tokens), np.float32)
        return Completion(tokens, probs, _versions(engine, choice, version), status)

    def _tokens(self, engine: PooledEngine, ids: list[int]) -> np.ndarray:
        if not ids:
            raise _garbage(engine, "a completion without tokens")
        if outside := [i for i in ids if not 0 <= i < self._vocab_size]:
            raise _garbage(engine, f"token id {outside[0]}, outside the model's vocabulary of {self._vocab_size}")
        return np.asarray(ids, np.int32)


def _logprobs(engine: PooledEngine, choice: _Choice) -> np.ndarray:
    content = choice.logprobs.content if choice.logprobs else None
    if content is None or [c.token_id for c in content] != choice.token_ids:
        raise _garbage(engine, f"log-probs that are not those of its {len(choice.token_ids)} tokens")
    values = np.asarray([c.logprob for c in content])
    bad = ~(np.abs(values) < -CLAMPED)
    if bad.any():
        at = int(bad.argmax())
        raise _garbage(engine, f"log-prob {values[at]} for token {choice.token_ids[at]} at position {at}: it is not finite")
    return values.astype(np.float32)


def _versions(engine: PooledEngine, choice: _Choice, version: int) -> np.ndarray:
    """The version of every token: as the engine says, or else the one that the call was made under."""
    count = len(choice.token_ids)
    versions = np.full(count, version, np.int32)
    position = 0
    for span in choice.weight_versions or ():
        if not span.version.isdecimal():
            raise _garbage(engine, f"tokens of weights called {span.version!r}, which are none that the trainer sent")
        if span.start != position or not span.start <= span.end <= count:
            raise _garbage(engine, f"weight versions that do not cover its {count} tokens: {span}")
        versions[span.start : span.end] = int(span.version)
        position = span.end
    if position not in (0, count):
        raise _garbage(engine, f"weight versions for {position} of its {count} tokens")
    return versions


def _garbage(engine: PooledEngine, what: str) -> PeerError:
    return PeerError(f"{engine} answered {what}", f"see {engine.log}")
