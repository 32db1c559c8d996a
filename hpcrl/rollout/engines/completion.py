"""How a response is sampled, the request for it, and what an engine answered, checked.

Invariants: where log-probs are wanted they are those that the trainer computes: of the whole distribution at the
sampling temperature; top-p, top-k and min-p cut what is sampled from, not what the log-probs are of
(`config/rules/sampling.py` refuses what no engine can answer so).  Every token of a completion is within the
vocabulary, has a finite log-prob where log-probs were asked for, and knows the policy version that it was sampled
under; an engine that answers anything else is named in the error.  A request is a pure function of its body, so sending
it twice is safe.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import PeerError
from hpcrl.models.files.config_json import read_config
from hpcrl.models.routing import Routing, find_routing
from hpcrl.rollout.engines.engine_pool import PendingCall, PooledEngine
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.sample import Sample
from hpcrl.transport.token_frames import EXPERTS, SampleRequest, read_answer
from hpcrl.utils.sample_parts import ABORTED, ENDS, TRUNCATED, SampleStatus


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        max_tokens: of a response at most.
        min_tokens: before which nothing stops it.
        logprobs: whether they are wanted; top_p in (0, 1], top_k -1 or at least 1, min_p in [0, 1]: which tokens are
            sampled from, by default all.
        skip_special_tokens: leave special tokens out of the text (that stop strings are looked for in, and that rewards
            read).
        evaluation: its requests are not ended by `Generator.abort`.
        routing: of a model whose choice of experts is wanted.
    """

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
    skip_special_tokens: bool = False
    evaluation: bool = False
    routing: Routing | None = None

    @classmethod
    def from_options(cls, options: Options, tokenizer: Tokenizer, evaluation: bool = False) -> Sampling:
        """As the options ask for in training; a held-out set says what it has otherwise (`evaluator.sampling_of`).

        The model's end-of-sequence ids always stop: an engine may know but one of them.
        """
        stops = tuple(sorted({*options.rollout_stop_token_ids, *tokenizer.eos_ids}))
        replays = options.use_rollout_routing_replay and not evaluation
        return cls(
            options.rollout_temperature,
            options.rollout_max_response_len,
            tuple(options.rollout_stop),
            stops,
            logprobs=not evaluation,
            top_p=options.rollout_top_p,
            top_k=options.rollout_top_k,
            skip_special_tokens=options.rollout_skip_special_tokens,
            evaluation=evaluation,
            routing=find_routing(options, read_config(tokenizer.directory)) if replays else None,
        )

    def params(self, max_tokens: int, begun: int = 0) -> dict[str, Any]:
        """vLLM's SamplingParams, without the seed.

        Args:
            max_tokens: that are still to come.
            begun: tokens that are there.
        """
        params: dict[str, Any] = {
            "n": 1,
            "temperature": self.temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "detokenize": bool(self.stop),
        }
        if self.stop:
            params |= {"stop": list(self.stop), "skip_special_tokens": self.skip_special_tokens}
            params["spaces_between_special_tokens"] = False
        if self.top_p < 1:
            params["top_p"] = self.top_p
        if self.top_k > 0:
            params["top_k"] = self.top_k
        if self.min_p > 0:
            params["min_p"] = self.min_p
        if self.repetition_penalty != 1:
            params["repetition_penalty"] = self.repetition_penalty
        if self.min_tokens > begun:
            params["min_tokens"] = self.min_tokens - begun
        if self.logprobs:
            params["logprobs"] = 0  # of the sampled token alone
        if self.routing is not None:
            params["extra_args"] = {EXPERTS: True}
        return params


def seed_of(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on `parts` alone, whatever the process or machine (BLAKE2b of their text)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


CLAMPED = -9999.0  #: what vLLM writes for a log-prob that is not finite, or that it does not have


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        tokens: int32 [response].
        logprobs: float32 [response], zeros if no log-probs were requested.
        versions: int32 [response].
        status: COMPLETED, TRUNCATED (as long as it may become), or ABORTED: ended early, with what was there, possibly
            nothing.
        experts: uint8 [prompt + response - 1, layers, bytes] (see `sample.OPTIONAL`), which the engine chose for every
            token that it read; None where they were not asked for, or there is no response.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    status: SampleStatus
    experts: np.ndarray | None = None

    @classmethod
    def empty(cls, status: SampleStatus = ABORTED) -> Completion:
        """No token yet."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), status)

    def after(self, begun: Completion | None) -> Completion:
        """This behind the tokens of an earlier part."""
        if begun is None or not len(begun.tokens):
            return self
        both = ((begun.tokens, self.tokens), (begun.logprobs, self.logprobs), (begun.versions, self.versions))
        experts = begun.experts
        if (
            experts is not None and self.experts is not None
        ):  # what was read before keeps the choice that its log-probs had
            experts = np.concatenate([experts, self.experts[len(experts) :]])
        return Completion(*(np.concatenate(parts) for parts in both), self.status, experts)

    def sample(self, group: int, index: int, prompt: Prompt, response: str, group_size: int = 1) -> Sample:
        """This as the answer number `index` to `prompt`.

        Args:
            response: its text.
            group_size: responses to the prompt.
        """
        experts = None if self.experts is None else np.concatenate([self.experts, 0 * self.experts[:1]])
        return Sample(
            group_index=group,
            response_index=index,
            group_size=group_size,
            tokens=np.concatenate([prompt.tokens, self.tokens]),
            response_length=len(self.tokens),
            loss_mask=np.ones(len(self.tokens), np.uint8),
            rollout_log_probs=self.logprobs,
            versions=self.versions,
            status=self.status,
            prompt=prompt.raw,
            response=response,
            label=prompt.label,
            metadata=dict(prompt.metadata),
            rollout_routed_experts=experts,
        )


def pending_sample(group: int, index: int, prompt: Prompt, group_size: int, reward_key: str | None = None) -> Sample:
    """A prompt that waits for its response."""
    return Sample(
        group_index=group,
        response_index=index,
        group_size=group_size,
        tokens=prompt.tokens,
        prompt=prompt.raw,
        label=prompt.label,
        metadata=dict(prompt.metadata),
        reward_key=reward_key,
    )


def completion_of(sample: Sample) -> Completion:
    """What `Completion.sample` made a sample of."""
    experts = sample.array("rollout_routed_experts") if sample.has("rollout_routed_experts") else None
    return Completion(
        sample.array("tokens")[sample.prompt_length :],
        sample.array("rollout_log_probs"),
        sample.array("versions"),
        sample.status,
        None if experts is None else experts[:-1],  # the engine has not read the last token
    )


_NUMBERS = itertools.count()


@dataclass(eq=False, kw_only=True)
class SampleCall(PendingCall):
    """One sample that is waited for, of a prompt (int32 [n]).

    Attributes:
        partial_tokens: tokens at the end of `prompt` that are the response's own.
        max_tokens: that may still come.
        exact: whether the limit is the only reason for which the engine may end the response as too long (False where
            the engine's context is not known).
        version: of the weights when it was asked for.
        name: of its own at engines.
        over: done when it has its answer.
    """

    prompt: np.ndarray
    sampling: Sampling
    seed: int | None
    partial_tokens: int
    max_tokens: int
    exact: bool
    version: int
    name: str = field(default_factory=lambda: f"{os.getpid():x}-{next(_NUMBERS):x}")
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def request(self) -> SampleRequest:
        """What an engine is sent."""
        params = self.sampling.params(self.max_tokens, self.partial_tokens)
        if self.seed is not None:
            params["seed"] = self.seed
        return SampleRequest(self.name, self.prompt.astype("<i4", copy=False).tobytes(), params)


def read_completion(engine: PooledEngine, call: SampleCall, data: bytes, vocab_size: int) -> Completion:
    """The completion in the body of an engine's answer, or PeerError that names the engine."""
    try:
        answer = read_answer(data)
        tokens, logprobs = answer.arrays()
    except ValueError as error:
        raise garbage(engine, f"no completion: {type(error).__name__}: {error}") from error
    completion = check(engine, call, vocab_size, answer.reason, tokens, logprobs, answer.spans)
    if (routing := call.sampling.routing) is None or not len(tokens):
        return completion
    read = len(call.prompt) + len(tokens) - 1
    return replace(completion, experts=read_experts(engine, answer.experts, answer.routing, read, routing))


def check(
    engine: PooledEngine,
    call: SampleCall,
    vocab_size: int,
    reason: str,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    spans: Iterable[tuple[str, int, int]],
) -> Completion:
    """A completion of an engine's answer, or PeerError that names the engine.

    Args:
        tokens: integers [n].
        logprobs: floats [n], or none where they were not asked for.
        spans: (version, start, end) of the output, empty if it says nothing.
    """
    status, count = ENDS.get(reason), len(tokens)
    if status is None:
        raise garbage(engine, f"no completion: it ended for the reason {reason!r}")
    if not count and status != ABORTED:
        raise garbage(engine, "a completion without tokens")
    if count > call.max_tokens:
        raise garbage(engine, f"{count} tokens, where {call.max_tokens} at most were asked for")
    if status == TRUNCATED and call.exact and count < call.max_tokens:
        raise garbage(engine, f"{count} tokens as the longest response, where {call.max_tokens} were asked for")
    if count and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise garbage(engine, f"token id {bad}, outside the model's vocabulary of {vocab_size}")
    if not call.sampling.logprobs or not count:
        logprobs = np.zeros(count, np.float32)
    elif len(logprobs) != count:
        raise garbage(engine, f"log-probs that are not those of its {count} tokens")
    elif not CLAMPED < logprobs.min() <= logprobs.max() < -CLAMPED:  # with a NaN both are
        at = int((np.abs(logprobs) < -CLAMPED).argmin())
        raise garbage(engine, f"log-prob {logprobs[at]} for token {tokens[at]} at position {at}: it is not finite")
    versions = _versions(engine, count, spans, call.version)
    return Completion(tokens.astype(np.int32, copy=False), logprobs.astype(np.float32, copy=False), versions, status)


def _versions(engine: PooledEngine, count: int, spans: Iterable[tuple[str, int, int]], version: int) -> np.ndarray:
    """The version of every token: as the engine says, or else the one that the call was made under."""
    versions, position = np.empty(count, np.int32), 0
    versions.fill(version)
    for name, start, end in spans:
        if not (name.isascii() and name.isdecimal()):
            raise garbage(engine, f"tokens of weights {name!r}, which the trainer never sent")
        if start != position or not start <= end <= count:
            raise garbage(engine, f"weight versions that do not cover its {count} tokens: {name} for [{start}, {end})")
        versions[start:end] = int(name)
        position = end
    if position not in (0, count):
        raise garbage(engine, f"weight versions for {position} of its {count} tokens")
    return versions


def read_experts(
    engine: PooledEngine, data: bytes, shape: tuple[int, int], tokens: int, routing: Routing
) -> np.ndarray:
    """`Completion.experts` of `tokens` that were read, or PeerError that names the engine.

    Args:
        shape: layers, all or those with experts, and bytes of each.
    """
    layers, width = shape
    wanted = routing.chosen * routing.dtype.itemsize
    if layers not in (routing.of, len(routing.layers)) or width != wanted or len(data) != tokens * layers * width:
        raise garbage(engine, f"{len(data)} bytes of experts in {layers} layers of {width} for {tokens} tokens")
    table = np.frombuffer(data, np.uint8).reshape(tokens, layers, width)
    return np.ascontiguousarray(table if layers == len(routing.layers) else table[:, routing.layers])


def garbage(engine: PooledEngine, what: str) -> PeerError:
    """The error for an invalid answer."""
    return PeerError(f"{engine} answered {what}", f"see {engine.log}")
