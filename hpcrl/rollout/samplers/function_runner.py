"""What a worker process does that runs the custom function: many calls at once.

Invariants: what a function does or returns ends its own call alone.  A sample that leaves here has arrays that fit each
other, tokens of the model, finite log-probs and a mask of 0 and 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np

from hpcrl.config.custom_functions import is_async, said_of, takes, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, option_text
from hpcrl.errors import UsageError
from hpcrl.rollout.prompts.tokenizer import Tokenizer, load_tokenizer
from hpcrl.rollout.samplers.conversation import Arguments, PolicyClient
from hpcrl.rollout.samplers.transcript import commands_of, turns_of
from hpcrl.rollout.slime_names.calls import SlimeCall, longest_response
from hpcrl.rollout.slime_names.conversion import NotSlimes
from hpcrl.rollout.slime_names.speakers import speaks_slime
from hpcrl.rollout.worker_messages import (
    ERROR,
    MOST,
    TIMEOUT,
    CustomCall,
    CustomResult,
    SamplerSetup,
    failure_of,
    frame,
)
from hpcrl.sample import ABORTED, COMPLETED, PENDING, TRUNCATED, PackedSample, Sample, pack, unpack
from hpcrl.sandbox.accounts import recording

LARGEST = 1e30  #: as of a reward


class NoSample(Exception):
    """What a function returned is not a sample."""


def samples_of(returned: Any, tokenizer: Tokenizer, longest: int) -> list[PackedSample]:
    """The samples in what a function returned.

    Args:
        longest: tokens of a response at most.

    Raises:
        NoSample: says what is wrong.
    """
    several = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not several:
        raise NoSample("returned an empty list: a response is one sample at least")
    if len(several) > MOST:
        raise NoSample(f"returned {len(several)} samples for one response, {MOST} at most are taken")
    for sample in several:
        if not isinstance(sample, Sample):
            raise NoSample(f"returned a {type(sample).__name__}, not a sample, a list of samples, or None")
    return [_checked(sample, tokenizer, longest) for sample in several]


def _checked(sample: Sample, tokenizer: Tokenizer, longest: int) -> PackedSample:
    tokens = _column(sample, "tokens", np.int64)
    count = sample.response_length
    if not isinstance(count, int | np.integer) or not 0 < count < len(tokens):
        raise NoSample(f"set response_length to {count!r}, of {len(tokens)} tokens of prompt and response together")
    if count > longest:
        raise NoSample(f"made a response of {count} tokens, --rollout-max-response-len is {longest}")
    if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
        raise NoSample(f"set a token outside of the model's vocabulary of {tokenizer.vocab_size}")
    mask, logprobs, versions = (
        _column(sample, name, kind)
        for name, kind in (("loss_mask", np.int64), ("logprobs", np.float64), ("versions", np.int64))
    )
    for name, column in (("loss_mask", mask), ("logprobs", logprobs), ("versions", versions)):
        if len(column) != count:
            raise NoSample(f"set {len(column)} {name} for a response of {count} tokens")
    if ((mask != 0) & (mask != 1)).any():
        raise NoSample("set a loss_mask of something else than 0 and 1")
    if not np.isfinite(logprobs).all():
        raise NoSample("set a log-prob that is not finite")
    if (versions < 0).any() or (versions >= 2**31).any():
        raise NoSample("set a policy version that is none")
    if sample.status not in (PENDING, COMPLETED, TRUNCATED, ABORTED):
        raise NoSample(f"set the status {sample.status!r}: it is completed, truncated or aborted")
    if sample.status == ABORTED:
        raise NoSample("gave the response up (status aborted)")
    status = COMPLETED if sample.status == PENDING else sample.status
    if not isinstance(sample.metadata, dict):
        raise NoSample("set metadata that is not a dict")
    reward = reward_of(sample)
    taken = Sample(
        group=0,  # whose response it is, the rollout process knows
        index=0,
        tokens=tokens,
        response_length=int(count),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        reward=math.nan if reward is None else reward,
        status=status,
        response=str(sample.response).encode(errors="replace").decode(),
        metadata=sample.metadata,
        rewards=parts_of(sample),
        remove_sample=bool(sample.remove_sample),
    )
    taken.transcript = turns_of(taken, tokenizer)
    return pack(taken)


def _column(sample: Sample, name: str, kind: type) -> np.ndarray:
    try:
        found = np.asarray([] if getattr(sample, name) is None else getattr(sample, name), kind)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    if found.ndim != 1:
        raise NoSample(f"set {name} to what is not a list of numbers")
    return found


def reward_of(sample: Sample) -> float | None:
    """The reward that a function has set, None for none.

    Raises:
        NoSample: if it is not a number.
    """
    if sample.reward is None:
        return None
    try:
        value = float(sample.reward)
    except (TypeError, ValueError):
        raise NoSample(f"set the reward to {sample.reward!r}, which is not a number") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise NoSample(f"set the reward to {value:g}: it must be finite, and at most {LARGEST:g}")
    return value


def parts_of(sample: Sample) -> dict[str, float]:
    """The named parts of the reward that a function has set, as far as they are finite.

    Raises:
        NoSample: if they are no numbers.
    """
    try:
        return {str(name): float(value) for name, value in sample.rewards.items() if math.isfinite(float(value))}
    except (AttributeError, TypeError, ValueError):
        raise NoSample("set rewards to what is not a dict of numbers") from None


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
        self._slimes = speaks_slime(self._function, str(self._options.custom_generate_function_path))
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )

    async def close(self) -> None:
        await self._http.close()

    def shares(self, call: CustomCall) -> bool:
        return True

    async def answer(self, call: CustomCall) -> bytes:
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
            return CustomResult(call.id, failure=TIMEOUT)
        except (NoSample, NotSlimes) as error:
            return CustomResult(call.id, failure=ERROR, text=str(error))
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            text = f"raised {said_of(error)}"
            return CustomResult(call.id, failure=failure_of(error), text=text, trace=trace_of(error))

    async def _run_call(self, call: CustomCall) -> CustomResult:
        sample = unpack(call.sample)
        sample.reward = None  # type: ignore[assignment]  # until the function sets one
        more = {"evaluation": call.evaluation} if self._told else {}
        most, given = call.sampling_params["max_new_tokens"], None
        if self._slimes:
            slimes = SlimeCall(self._options, self._tokenizer, call, sample)
            returned, given = slimes.taken(
                await self._function(slimes.args, slimes.sample, dict(slimes.params), **more)
            )
            sample = slimes.untouched() if returned is None else sample
            most = longest_response(self._options, self._tokenizer, most)
        else:
            engine = PolicyClient(call.base_url, call.api_key, self._http)
            args = Arguments(
                self._options, engine, self._tokenizer, call.base_url, call.api_key, call.evaluation, call.version
            )
            returned = await self._function(args, sample, dict(call.sampling_params), **more)
        if returned is None:
            if not isinstance(sample.metadata, dict):
                raise NoSample("set metadata that is not a dict")
            return CustomResult(call.id, reward=reward_of(sample), rewards=parts_of(sample), metadata=sample.metadata)
        return CustomResult(call.id, samples_of(returned, self._tokenizer, most), given=given)
