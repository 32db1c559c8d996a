"""What a worker process does that runs the custom function: many calls at once.

Invariants: what a function does or returns ends its own call alone.  A sample that leaves here is whole
(`Sample.check`), of tokens of the model.  A call asks under its own key; the prompt is the text of the very tokens that
the run has of it, where that text is encoded as them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.custom_functions import is_async, said_of, takes, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, option_text
from hpcrl.engine.membership.http import client_session
from hpcrl.errors import UsageError, is_mistake
from hpcrl.rollout.prompts.tokenizer import Tokenizer, load_tokenizer
from hpcrl.rollout.samplers.conversation import TEXT, PolicyClient
from hpcrl.rollout.samplers.transcript import commands_of, turns_of
from hpcrl.rollout.slime_names.arguments import Arguments, ResponseTools
from hpcrl.rollout.slime_names.http import ROUTER, Router
from hpcrl.rollout.worker_messages import (
    ERROR,
    MOST,
    CustomCall,
    CustomResult,
    PackedSample,
    SamplerSetup,
    failure_of,
    frame,
    pack,
    unpack,
)
from hpcrl.sample import BadSample, Sample
from hpcrl.sandbox.accounts import recording
from hpcrl.utils.sample_parts import ABORTED, COMPLETED, PENDING


class NoSample(Exception):
    """What a function returned is not a sample."""


def samples_of(returned: Any, asked: Sample, tokenizer: Tokenizer, longest: int) -> list[PackedSample]:
    """The samples in what a function returned.

    Args:
        asked: the prompt that it was given.
        longest: tokens of a response at most.

    Raises:
        NoSample, BadSample: says what is wrong.
    """
    several = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not several:
        raise NoSample("returned an empty list: a response is one sample at least")
    if len(several) > MOST:
        raise NoSample(f"returned {len(several)} samples for one response, {MOST} at most are taken")
    for sample in several:
        if not isinstance(sample, Sample):
            raise NoSample(f"returned a {type(sample).__name__}, not a sample, a list of samples, or None")
    return [_checked(sample, asked, tokenizer, longest) for sample in several]


def _checked(sample: Sample, asked: Sample, tokenizer: Tokenizer, longest: int) -> PackedSample:
    taken = sample.replace(**{name: getattr(asked, name) for name in _OF_PROMPT})
    if taken.has("rollout_log_probs") and not len(taken.array("rollout_log_probs")):
        taken.rollout_log_probs = None
    taken.check()
    count, tokens = taken.response_length, taken.array("tokens")
    if not 0 < count < len(tokens):
        raise NoSample(f"set response_length to {count}, of {len(tokens)} tokens of prompt and response together")
    if count > longest:
        raise NoSample(f"made a response of {count} tokens, more than --rollout-max-context-len leaves: {longest}")
    if tokens.max() >= tokenizer.vocab_size:
        raise NoSample(f"set a token outside of the model's vocabulary of {tokenizer.vocab_size}")
    if taken.status == ABORTED:
        raise NoSample("gave the response up (status aborted)")
    if taken.status == PENDING:
        taken.status = COMPLETED
    taken.transcript = turns_of(taken, tokenizer)
    return pack(taken)


#: what of a sample the run knows better than the function
_OF_PROMPT = ("group_index", "response_index", "group_size", "reward_key", "baseline", "grading", "grading_error")
_OF_PROMPT += ("teacher_error", "teacher_log_probs", "rollout_routed_experts")


# ---- the process

OPTION = "custom_generate_function_path"


def load_generate(path: str) -> Callable[..., Any]:
    """The function of --custom-generate-function-path.

    Raises:
        UsageError: if it cannot be used.
    """
    function = load_own(OPTION, path)
    if not is_async(function):
        raise UsageError(
            f"{option_text(OPTION)} {path} is not async",
            "declare it: async def generate(args, sample, sampling_params)",
        )
    return function


class FunctionRunner:
    """The function of a process.  Many calls of it run side by side."""

    def __init__(self, setup: SamplerSetup) -> None:
        """UsageError, or whatever the user's module raises."""
        self.waits: list[str] = []
        self._options = Options.model_validate_json(setup.options)
        self._function = load_generate(str(self._options.custom_generate_function_path))
        self._tokenizer = load_tokenizer(self._options.hf_checkpoint)
        self._told = takes(self._function, "evaluation")
        self._args = Arguments(self._options)
        self._http = client_session()

    def shares(self, call: CustomCall) -> bool:
        return True

    def call(self, call: CustomCall) -> None: ...

    async def answer(self, call: CustomCall, called: None) -> bytes:
        with recording() as record:
            done = await self._done(call)
        done.transcript = commands_of(record)
        try:
            return frame(done)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            return frame(CustomResult(call.id, failure=ERROR, text=f"set metadata that is not plain data: {error}"))

    async def _done(self, call: CustomCall) -> CustomResult:
        """What came of a call, whatever the function does."""
        try:
            return await self._run_call(call)
        except asyncio.CancelledError:
            raise
        except (NoSample, BadSample) as error:
            return CustomResult(call.id, failure=ERROR, text=str(error), mistake=True)
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            text = f"raised {said_of(error)}"
            found = {"failure": failure_of(error), "text": text, "trace": trace_of(error)}
            return CustomResult(call.id, **found, mistake=is_mistake(error))

    async def _run_call(self, call: CustomCall) -> CustomResult:
        asked = unpack(call.sample)
        prompt = asked.prompt
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        engine = PolicyClient(call.base_url, call.api_key, self._http)
        tokens = asked.array("tokens").tolist()
        args = self._args.of_response(
            ResponseTools(
                engine, self._tokenizer, call.base_url, call.api_key, call.evaluation, call.version, messages, tokens
            )
        )
        ROUTER.set(Router.from_base_url(call.base_url, call.api_key))
        sample = asked.replace(tokens=None, prompt=self._text(asked))
        skipped = {"skip_special_tokens": self._options.rollout_skip_special_tokens}
        more = {"evaluation": call.evaluation} if self._told else {}
        returned = await self._function(args, sample, call.sampling_params | TEXT | skipped, **more)
        if returned is not None:
            most = self._options.rollout_max_context_len or self._tokenizer.context or 0
            longest = max(call.sampling_params["max_new_tokens"], most)
            return CustomResult(call.id, samples_of(returned, asked, self._tokenizer, longest))
        left = sample.replace(tokens=None, response_length=0, loss_mask=None, rollout_log_probs=None, versions=None)
        left.check()
        return CustomResult(call.id, given=pack(left, columns=False))

    def _text(self, asked: Sample) -> Any:
        """The prompt as slime has it: with --apply-chat-template the text that the model reads."""
        if not self._options.apply_chat_template:
            return asked.prompt
        tokens = asked.array("tokens")
        text = self._tokenizer.decode_text(tokens)
        if np.array_equal(self._tokenizer.encode([text])[0], tokens):
            return text
        messages = asked.prompt if isinstance(asked.prompt, list) else [{"role": "user", "content": asked.prompt}]
        return self._tokenizer.render(messages, generation=True)
