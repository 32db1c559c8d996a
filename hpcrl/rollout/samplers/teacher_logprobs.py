"""A teacher behind an address: its log-probs of the tokens that the student sampled (--opd-type vllm).

It is any vLLM server: POST /v1/completions with the token ids of prompt and response and `prompt_logprobs`, which gives
the log-prob of each of them at temperature 1.

Invariants: ids go out and are compared with what comes back, text never; a teacher with another tokenizer is refused
before anything is sampled; the teacher changes no token and no reward, and is not shown what is not trained on (greedy
and unfinished responses); every wait has a deadline that names the address.
"""

from __future__ import annotations

import asyncio
import os

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError, PeerError, UsageError
from hpcrl.rollout.grading.service import Tallies
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.remote_server import RemoteServer, StatusError
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest, Sampler
from hpcrl.run.role import say
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED

KEY = "HPCRL_OPD_TEACHER_KEY"  #: environment variable with the server's key, if it asks for one
PROBED = 512  #: token ids whose text both tokenizers must cut alike
CLAMPED = -9999.0  #: what vLLM writes for a log-prob that is not finite


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """Asks the server; keeps its connections."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        url = str(options.opd_teacher_url).rstrip("/").removesuffix("/v1")
        self._server = RemoteServer(f"the teacher at --opd-teacher-url {url}", url, os.environ.get(KEY))
        self._model = options.opd_teacher_model
        self._size = options.samples_per_rollout
        self._each = options.n_samples_per_prompt
        self._tallies = Tallies(options.reward_max_failed)

    def __str__(self) -> str:
        return str(self._server)

    async def close(self) -> None:
        await self._server.close()

    async def check(self) -> None:
        """See that the server is there, serves the model and has the student's tokens.

        Raises:
            PeerError: if it does not answer.
            UsageError: if it does not serve --opd-teacher-model.
            DataError: if a token is another.
        """
        known = [str(model["id"]) for model in (await self._server.request_json("/v1/models"))["data"]]
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
            theirs = (await self._server.request_json("/tokenize", msgspec.json.encode(body)))["tokens"]
        except StatusError as error:
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
                f"{self} has another vocabulary: for one text its token {at} is {said}",
                "a teacher's tokens must be the student's: choose a teacher with the same tokenizer",
            )

    # ---- one sample

    async def mark(self, sample: Sample, rollout_id: int, where: str) -> None:
        """Set the sample's `teacher_log_probs`.

        Args:
            where: the prompt's file and line. If the teacher gives none they are the sample's own, which pull nowhere,
                and `Sample.teacher_error` says why.

        Raises:
            HpcrlError: once that has happened to more of a rollout than --reward-max-failed allows.
        """
        try:
            sample.teacher_log_probs = await self._logprobs(sample)
        except PeerError as error:
            sample.teacher_log_probs = sample.array("rollout_log_probs").astype(np.float32)
            sample.teacher_error = error.what
            text = f"{error.what} on response {sample.response_index} of group {sample.group_index} ({where})"
            self._tallies.say(error.what, text)
            self._tallies.tally_of(f"rollout {rollout_id} by the teacher", self._size, self._each).fail(where, text)

    async def _logprobs(self, sample: Sample) -> np.ndarray:
        """float32 [response].

        Raises:
            PeerError: names the address and what came instead.
        """
        tokens = sample.array("tokens").tolist()
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._server.ask_patiently("/v1/completions", body, self._options.reward_timeout)
        try:
            given = msgspec.convert(answer, _Answer).choices[0].prompt_logprobs or []
        except (msgspec.ValidationError, IndexError) as error:
            raise PeerError(f"{self} answered no completion: {error}") from error
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
