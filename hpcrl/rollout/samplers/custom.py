"""Responses that the user's function makes (--custom-generate-function-path): several turns, tools, agents.

Invariants: the function runs in a process of its own and reaches the engines through the endpoint alone, with a key of
its response; a call that fails costs its response, which then earns 0 and trains nothing, and above a share of a batch
the run; an engine's failure ends the run as it does without a function.  A call whose time is up is cancelled, and a
process that continues is killed; time that an engine works on a call's requests is not the call's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.models.routing import R3, Routing
from hpcrl.rollout.endpoint.recorded_turns import AskedTurn, choices_of
from hpcrl.rollout.endpoint.server import Endpoint
from hpcrl.rollout.endpoint.session import ResponseContext, Session, sampling_params
from hpcrl.rollout.engines.completion import Sampling, pending_sample
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.grading.service import Grading, Tallies
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampled_tokens import received
from hpcrl.rollout.samplers.sampler import ResponseRequest
from hpcrl.rollout.samplers.transcript import turns_of
from hpcrl.rollout.worker_messages import ERROR, TIMEOUT, CustomCall, CustomResult, SamplerSetup, send_sample, unpack
from hpcrl.rollout.worker_pool import Job, WorkerFailure, WorkerPool, with_retries
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED

SIDE_BY_SIDE = 256  #: calls in one process at once
FLAG = "--custom-generate-function-path"


class CustomSampler:
    """Made, it has started its process; `start` waits for it and opens the endpoint.

    Attributes:
        pool: its process.
    """

    def __init__(self, options: Options, tokenizer: Tokenizer, grading: Grading | None) -> None:
        """Create one.

        Args:
            grading: None where the function sets every reward.
        """
        self._options = options
        self._tokenizer = tokenizer
        self._grading = grading
        self._train = Sampling.from_options(options, tokenizer)
        setup = SamplerSetup(options.model_dump_json().encode())
        self.pool = WorkerPool(setup, 1, SIDE_BY_SIDE, "the process that runs the custom function")
        self._endpoint = Endpoint()
        self._client: EngineClient | None = None
        self._context: Callable[[], int | None] = lambda: None
        self._tallies = Tallies(options.reward_max_failed, "generations")

    def use(self, client: EngineClient, context: Callable[[], int | None]) -> None:
        """The engines.

        Args:
            context: tokens that they can hold, None while that is not known.
        """
        self._client = client
        self._context = context

    async def start(self) -> None:
        """Wait until the function is loaded.

        Raises:
            UsageError: says what is wrong with it.
        """
        await self.pool.start()
        await self._endpoint.start()

    async def close(self) -> None:
        """End the processes and the endpoint."""
        await self.pool.close()
        await self._endpoint.stop()

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        """The samples of one response; if the run ended it early, one that is ABORTED and has no token: the function is
        called again another time, from its beginning.

        Raises:
            HpcrlError: once too many calls of the batch have failed, or an engine has.
        """
        if asked.partial and all(sample.status != ABORTED for sample in asked.partial):  # finished, and not graded
            found = list(asked.partial)
            await self._grade(asked, found)
            return found
        making = ResponseContext(asked.sampling(self._train), asked.seed(self._options.rollout_seed), asked.version)
        each, key = self._options.n_samples_per_prompt, self._options.reward_key
        if asked.held_out:
            each, key = asked.held_out.n_samples_per_prompt, asked.held_out.by.key
        prompt = pending_sample(asked.group.number, asked.index, asked.group.prompt, each, key)
        done, found = await with_retries(
            lambda patience: self._call(asked, making, prompt, patience),
            lambda result: result[0].failure if result[0] else "",
            self._options.deterministic_mode,
        )
        if done is None:
            return [prompt.replace(status=ABORTED)]
        if done.failure:
            return [self._failed(asked, prompt, done)]
        asked.results.extend(found)
        await self._grade(asked, found)
        return found

    # ---- the call

    async def _call(
        self, asked: ResponseRequest, making: ResponseContext, prompt: Sample, patience: int
    ) -> tuple[CustomResult | None, list[Sample]]:
        """What came of one call, and its samples if it did not fail; None if the run ended it early."""
        assert self._client is not None, "use() comes first"
        sessions: list[tuple[str, Session]] = []

        def call(number: int) -> CustomCall:
            session = Session(making, self._client, self._tokenizer, self._context)
            sessions.append((self._endpoint.open(session), session))
            return CustomCall(
                number,
                send_sample(prompt, columns=True),
                sampling_params(making.sampling),
                self._endpoint.base_url,
                sessions[-1][0],
                asked.held_out is not None,
                asked.version,
            )

        seconds = self._options.custom_generate_timeout * patience
        job = Job(
            request=call,
            seconds=seconds,
            late=f"took more than {seconds:g} s besides its engines, a limit that --timeout-factor scales",
            shares=True,
            alone=patience > 1,
            paused=lambda: sessions[-1][1].in_flight > 0,
        )
        try:
            try:
                done: CustomResult = await self.pool.run(job)
            except WorkerFailure as error:
                done = CustomResult(-1, failure=error.kind, text=error.text)
            session = sessions[-1][1] if sessions else None
            if session is not None and session.broken is not None:
                raise session.broken
            if session is not None and session.ended:
                return None, []
            if done.failure:
                return done, []
            assert session is not None
            return self._routed(*self._samples(done, prompt, session), session)
        finally:
            for key, _ in sessions:
                self._endpoint.close(key)

    def _samples(self, done: CustomResult, prompt: Sample, session: Session) -> tuple[CustomResult, list[Sample]]:
        """The samples that the function returned, or that the endpoint has seen made."""
        if done.samples is not None:
            done, found = received(done, prompt, session)
            return done, _with_commands(found, done)
        if not session.dialogues:
            return CustomResult(done.id, failure=ERROR, text="returned None, but asked nothing at the endpoint"), []
        assert done.given is not None
        given = unpack(done.given).replace(prompt=prompt.prompt, label=prompt.label)
        found = []
        for dialogue in session.dialogues:
            sample = dialogue.trajectory.sample(given, self._tokenizer)
            sample.rewards = given.rewards
            sample.transcript = turns_of(sample, self._tokenizer)
            found.append(sample)
        return done, _with_commands(found, done)

    def _routed(self, done: CustomResult, samples: list[Sample], session: Session) -> tuple[CustomResult, list[Sample]]:
        """The same with the experts that engines chose, where they are to be replayed."""
        if done.failure or (routing := session.making.sampling.routing) is None:
            return done, samples
        try:
            return done, [with_experts(sample, session.turns, routing) for sample in samples]
        except UnaskedTokens as error:
            return CustomResult(done.id, failure=ERROR, text=str(error)), []

    # ---- rewards

    async def _grade(self, asked: ResponseRequest, samples: Sequence[Sample]) -> None:
        """The rewards of those samples that the function gave none: that of the response, by its last sample.

        The parts that the function has named stay, in addition to those of the reward.
        """
        if all(sample.graded for sample in samples):
            return
        named = [dict(sample.rewards) for sample in samples]
        last, where = samples[-1], asked.group.prompt.where
        if not last.graded:
            graded = bool(asked.held_out.by.words) if asked.held_out else self._options.grades
            if not graded and self._options.advantage_estimator == "none" and not asked.held_out:
                last.reward = 0.0  # a teacher says what is learned
            elif not graded or self._grading is None:
                last.reward, last.grading = 0.0, ERROR
                last.grading_error = f"{FLAG} set no reward, and no --rm-type is given"
                shown = f"response {last.response_index} of group {last.group_index}, {where}"
                self._count(asked, where, f"{last.grading_error} ({shown})")
            else:
                tally = self._grading.tally(*asked.batch(self._options))
                await self._grading.grade(last, where, tally, asked.held_out.by if asked.held_out else None)
        parts = dict(last.rewards)
        last.rewards = named[-1] | parts
        for sample, own in zip(samples[:-1], named, strict=False):
            if not sample.graded:
                sample.reward = last.score
                sample.rewards = own | parts
                sample.grading = last.grading
                sample.grading_error = last.grading_error

    # ---- failures

    def _failed(self, asked: ResponseRequest, prompt: Sample, done: CustomResult) -> Sample:
        """A response in place of one that could not be made: one token, which trains nothing, and reward 0."""
        where = asked.group.prompt.where
        text = f"{FLAG} {self._options.custom_generate_function_path} {done.text}"
        shown = f"{text} on response {asked.index} of group {asked.group.number} ({where})"
        self._tallies.say(text, f"failed generation: {shown}", done.trace)
        self._count(asked, where, shown, done.mistake)
        end = np.asarray([min(self._tokenizer.eos_ids, default=0)], np.int32)
        tokens = np.concatenate([prompt.array("tokens"), end])
        routing = asked.sampling(self._train).routing
        return prompt.replace(
            tokens=tokens,
            response_length=1,
            loss_mask=np.zeros(1, np.uint8),
            rollout_log_probs=np.zeros(1, np.float32),
            versions=np.full(1, asked.version, np.int32),
            reward=0.0,
            status=COMPLETED,
            grading=TIMEOUT if done.failure == TIMEOUT else ERROR,
            grading_error=text,
            transcript=done.transcript,
            rollout_routed_experts=None if routing is None else unknown_experts(len(tokens), routing),
        )

    def _count(self, asked: ResponseRequest, where: str, text: str, mistake: bool = True) -> None:
        """Count a failed call.

        Raises:
            HpcrlError: if those of the batch are too many.
        """
        self._tallies.tally_of(*asked.batch(self._options)).fail(where, text, mistake)


def _with_commands(samples: list[Sample], done: CustomResult) -> list[Sample]:
    """Samples of a call; the last has what the call did in sandboxes."""
    if samples and done.transcript:
        samples[-1].transcript = samples[-1].transcript | done.transcript
    return samples


async def started(*parts: CustomSampler | Grading | None) -> None:
    """Wait until all of them are ready.

    Raises:
        UsageError: of the first that is not.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                if part is not None:
                    tasks.create_task(part.start())
    except BaseExceptionGroup as group:
        first = next((error for error in group.exceptions if isinstance(error, HpcrlError)), group.exceptions[0])
        raise first from None


# ---- experts of tokens
#
# The experts of a sample that a custom function has returned (--use-rollout-routing-replay).
#
# Invariant: every token that a trained one follows from has the experts by which an engine read or sampled it, after
# exactly the tokens before it; a sample without that certainty is refused.


class UnaskedTokens(Exception):
    """A sample's tokens are not those that the policy was asked with, so that no engine has said their experts."""


def unknown_experts(tokens: int, routing: Routing) -> np.ndarray:
    """The column of a sample whose tokens no engine has read."""
    return np.zeros((tokens, len(routing.layers), routing.chosen * routing.dtype.itemsize), np.uint8)


def with_experts(sample: Sample, turns: Sequence[AskedTurn], routing: Routing) -> Sample:
    """The sample with the experts of each token before its last trained one; those behind that are unknown.

    Args:
        turns: of its response, in the order of the requests.

    Raises:
        UnaskedTokens: if the policy was not asked with exactly the tokens before a trained one.
    """
    experts = unknown_experts(len(sample.array("tokens")), routing)
    trained = np.flatnonzero(sample.array("loss_mask"))
    if len(trained):
        read = sample.prompt_length + int(trained[-1])
        if (found := choices_of(sample.array("tokens")[:read], turns)) is None:
            raise UnaskedTokens(
                f"returned other tokens than those that it had asked the policy with, and {R3} needs the experts of "
                "each: return what a Conversation makes, or None after asking at the endpoint"
            )
        experts[:read] = found
    return sample.replace(rollout_routed_experts=experts)
