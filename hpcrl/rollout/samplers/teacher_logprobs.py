"""A teacher behind an address: its log-probs of the tokens that the student sampled (--opd-type vllm).

It is any vLLM server: POST /v1/completions with the token ids of prompt and response and `prompt_logprobs`, which gives
the log-prob of each of them at temperature 1.

Invariants: ids go out and are compared with what comes back, text never; a teacher with another tokenizer is refused
before anything is sampled; the teacher changes no token and no reward, and is not shown what nobody trains on (greedy
and unfinished responses); every wait has a deadline that names the address.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError, PeerError, UsageError
from hpcrl.rollout.grading.tally import Tallies
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest, Sampler
from hpcrl.run.role import say
from hpcrl.sample import ABORTED, Sample
from hpcrl.toolbox.deadline import Deadline

KEY = "HPCRL_OPD_TEACHER_KEY"  #: environment variable with the server's key, if it asks for one
NAME = "teacher_logprobs"
ATTEMPTS = 10  #: questions about one sample, at most
LONGEST_PAUSE = 30.0  #: seconds between two of them
CONNECTIONS = 64
AGAIN = {408, 429}  #: HTTP statuses, besides 5xx, after which it is asked again
PROBED = 512  #: token ids whose text both tokenizers must cut alike
CLAMPED = -9999.0  #: what vLLM writes for a log-prob that is not finite


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Teacher:
    """Asks the server; keeps its connections."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._url = str(options.opd_teacher_url).rstrip("/").removesuffix("/v1")
        self._model = options.opd_teacher_model
        self._size = options.samples_per_rollout
        self._each = options.n_samples_per_prompt
        self._session: aiohttp.ClientSession | None = None
        self._tallies = Tallies(options.reward_max_failed)

    def __str__(self) -> str:
        return f"the teacher at --opd-teacher-url {self._url}"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def check(self) -> None:
        """See that the server is there, serves the model and has the student's tokens.

        PeerError if it does not answer; UsageError if it does not serve --opd-teacher-model; DataError if a token is
        another.
        """
        key = os.environ.get(KEY)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS), headers=headers)
        known = [model.id for model in msgspec.convert(await self._ask("/v1/models"), _Models).data]
        if self._model is None:
            self._model = known[0] if known else ""
        if self._model not in known:
            raise UsageError(
                f"{self} does not serve {self._model or 'any model'}", f"it serves: {', '.join(known) or 'none'}"
            )
        await self._compare_tokens()

    async def _compare_tokens(self) -> None:
        """Both tokenizers must cut a text of tokens from the whole vocabulary alike."""
        size = self._tokenizer.vocab_size
        ids = np.unique(np.linspace(0, size - 1, min(PROBED, size)).astype(np.int32))
        text = self._tokenizer.decode(ids)
        (own,) = self._tokenizer.encode([text])
        try:
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            theirs = msgspec.convert(await self._ask("/tokenize", body), _Tokens).tokens
        except aiohttp.ClientResponseError as error:
            say(
                f"{self} has no /tokenize (HTTP {error.status}): whether its tokens are the student's could not be "
                "compared"
            )
            return
        if theirs != own.tolist():
            at = next(
                i for i, pair in enumerate(zip([*theirs, -1], [*own.tolist(), -1], strict=False)) if pair[0] != pair[1]
            )
            said = (
                f"{theirs[at] if at < len(theirs) else 'nothing'}, --hf-checkpoint's "
                f"{own[at] if at < len(own) else 'nothing'}"
            )
            raise DataError(
                f"{self} has another vocabulary: of one text its token {at} is {said}",
                "a teacher's tokens must be the student's: choose a teacher with the same tokenizer",
            )

    # ---- one sample

    async def mark(self, sample: Sample, rollout_id: int, where: str) -> None:
        """Set the sample's log-probs under the teacher (`Sample.extra`), float32 [response].

        where: the prompt's file and line.  If the teacher gives none they are the sample's own, which pull nowhere, and
        `Sample.teacher_error` says why; HpcrlError once that has happened to more of a rollout than --reward-max-failed
        allows.
        """
        try:
            sample.extra[NAME] = await self._logprobs(sample)
        except PeerError as error:
            sample.extra[NAME], sample.teacher_error = sample.logprobs.astype(np.float32), error.what
            text = f"{error.what} on response {sample.index} of group {sample.group} ({where})"
            self._tallies.say(error.what, text)
            self._tallies.of(f"rollout {rollout_id} by the teacher", self._size, self._each).fail(where, text)

    async def _logprobs(self, sample: Sample) -> np.ndarray:
        """float32 [response].  PeerError names the address and what came instead."""
        tokens = sample.tokens.tolist()
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._patiently("/v1/completions", body)
        try:
            given = msgspec.convert(answer, _Answer).choices[0].prompt_logprobs or []
        except (msgspec.ValidationError, IndexError) as error:
            raise PeerError(f"{self} answered what is not a completion: {error}") from error
        if len(given) != len(tokens):
            raise PeerError(f"{self} gave log-probs of {len(given)} tokens for a prompt of {len(tokens)}")
        first = len(tokens) - sample.response_length
        pairs = list(zip(tokens[first:], given[first:], strict=True))
        found = np.asarray(
            [entry[str(token)].logprob if entry and str(token) in entry else np.nan for token, entry in pairs]
        )
        bad = ~(np.abs(found) < -CLAMPED)
        if bad.any():
            at = int(bad.argmax())
            raise PeerError(f"{self} gave {found[at]} as the log-prob of token {tokens[first + at]}: it is not finite")
        return found.astype(np.float32)

    # ---- the wire

    async def _patiently(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer, asked for again with growing pauses within --reward-timeout."""
        deadline = Deadline(0.95 * self._options.reward_timeout)
        trouble = "nothing"
        attempt = 0
        for attempt in range(ATTEMPTS):
            left = deadline.left
            if left <= 0:
                break
            try:
                return await self._ask(path, body, left)
            except aiohttp.ClientResponseError as error:
                trouble = f"HTTP {error.status}: {error.message}"
                if error.status < 500 and error.status not in AGAIN:
                    break
            except PeerError as error:
                trouble = error.what
            spread = (
                hashlib.blake2b(str(body["prompt"]).encode(), digest_size=1).digest()[0] / 256
            )  # so that not all ask at once
            await asyncio.sleep(min(2.0**attempt + spread - 1, LONGEST_PAUSE, deadline.left))
        raise PeerError(f"got no answer from {self} in {attempt + 1} attempts; the last: {trouble}")

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = 60.0) -> Any:
        """JSON of a GET, or with a body of a POST.  PeerError if there is none; ClientResponseError for another status
        than 200."""
        assert self._session is not None, "check() comes first"
        timeout = aiohttp.ClientTimeout(total=seconds)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                "POST" if data else "GET", self._url + path, data=data, timeout=timeout
            ) as answer:
                text = await answer.read()
                if answer.status != 200:
                    said = text[:300].decode(errors="replace")
                    raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message=said)
                return msgspec.json.decode(text)
        except aiohttp.ClientResponseError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise PeerError(f"{self} did not answer {path}: {type(error).__name__}: {error}".rstrip(": ")) from error
        except msgspec.DecodeError as error:
            raise PeerError(
                f"{self} answered {path} with what is not JSON: {text[:100].decode(errors='replace')!r}"
            ) from error


class TeacherLogprobsSampler:
    """Shows every sample to the teacher once it is made."""

    def __init__(self, sampler: Sampler, teacher: Teacher) -> None:
        self._sampler = sampler
        self._teacher = teacher

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        samples = await self._sampler.make(asked)
        if asked.index != GREEDY and not any(sample.status == ABORTED for sample in samples):
            where = asked.group.prompt.where
            await asyncio.gather(*(self._teacher.mark(sample, asked.rollout_id, where) for sample in samples))
        return samples
