"""A process that runs the custom function: many calls at once, until its socket closes.

    python -m hpcrl.rollout.samplers.worker FD        (started by function_pool.py; FD is its end of a socket pair)

Invariants: it dies with the rollout process; what a function prints goes to the rollout's log and never into the
protocol; what a function does or returns ends its own call alone.  A sample that leaves here has arrays that fit each
other, tokens of the model, finite log-probs and a mask of 0 and 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np

from hpcrl.config.custom_functions import is_async, said_of, takes, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, spelled
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.prompts.tokenizer import Tokenizer, load_tokenizer
from hpcrl.rollout.samplers.conversation import Arguments, Engine
from hpcrl.rollout.worker_messages import (
    ERROR,
    TIMEOUT,
    CancelCall,
    CustomCall,
    CustomResult,
    FunctionLoaded,
    SamplerSetup,
)
from hpcrl.rollout.worker_pool import frame, receive
from hpcrl.run.process import die_with_parent
from hpcrl.sample import ABORTED, COMPLETED, PENDING, TRUNCATED, PackedSample, Sample, pack, unpack

MOST = 256  #: samples of one response
LARGEST = 1e30  #: as of a reward


class NoSample(Exception):
    """What a function returned is not a sample."""


def samples_of(returned: Any, vocab_size: int, longest: int) -> list[PackedSample]:
    """The samples in what a function returned; longest: tokens of a response at most.  NoSample says what is wrong."""
    several = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not several:
        raise NoSample("returned an empty list: a response is one sample at least")
    if len(several) > MOST:
        raise NoSample(f"returned {len(several)} samples for one response, {MOST} at most are taken")
    for sample in several:
        if not isinstance(sample, Sample):
            raise NoSample(f"returned a {type(sample).__name__}, not a sample, a list of samples, or None")
    return [_checked(sample, vocab_size, longest) for sample in several]


def _checked(sample: Sample, vocab_size: int, longest: int) -> PackedSample:
    tokens = _column(sample, "tokens", np.int64)
    count = sample.response_length
    if not isinstance(count, int | np.integer) or not 0 < count < len(tokens):
        raise NoSample(f"set response_length to {count!r}, of {len(tokens)} tokens of prompt and response together")
    if count > longest:
        raise NoSample(f"made a response of {count} tokens, --rollout-max-response-len is {longest}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise NoSample(f"set a token outside of the model's vocabulary of {vocab_size}")
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
        response=_text(sample.response),
        metadata=sample.metadata,
        rewards=parts_of(sample),
        remove_sample=bool(sample.remove_sample),
    )
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
    """The reward that a function has set, None for none.  NoSample if it is not a number."""
    if sample.reward is None:
        return None
    try:
        value = float(sample.reward)
    except (TypeError, ValueError):
        raise NoSample(f"set the reward to {sample.reward!r}, which is not a number") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise NoSample(f"set the reward to {value:g}: it must be finite, and at most {LARGEST:g}")
    return value


def _text(response: Any) -> str:
    return response.encode(errors="replace").decode() if isinstance(response, str) else str(response)


def parts_of(sample: Sample) -> dict[str, float]:
    """The named parts of the reward that a function has set, as far as they are finite.  NoSample if they are no
    numbers."""
    try:
        return {str(name): float(value) for name, value in sample.rewards.items() if math.isfinite(float(value))}
    except (AttributeError, TypeError, ValueError):
        raise NoSample("set rewards to what is not a dict of numbers") from None


# ---- the process

OPTION = "custom_generate_function_path"
_REQUESTS = msgspec.msgpack.Decoder(CustomCall | CancelCall)


def load_generate(path: str) -> Callable[..., Any]:
    """The function of --custom-generate-function-path.  UsageError if it cannot be used."""
    function = load_own(OPTION, path)
    if not is_async(function):
        raise UsageError(
            f"{spelled(OPTION)} {path} is not async", "declare it: async def generate(args, sample, sampling_params)"
        )
    return function


class RunningCalls:
    """The calls that run."""

    def __init__(
        self, options: Options, function: Callable[..., Any], tokenizer: Tokenizer, writer: asyncio.StreamWriter
    ) -> None:
        self._options = options
        self._function = function
        self._tokenizer = tokenizer
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._told = takes(function, "evaluation")

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Run what comes until the socket closes."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        ) as http:
            while True:
                request = _REQUESTS.decode(await receive(reader))
                if isinstance(request, CustomCall):
                    task = asyncio.create_task(self._run(request, http))
                    self._running[request.id] = task
                    task.add_done_callback(lambda _, number=request.id: self._running.pop(number, None))
                elif task := self._running.get(request.id):
                    task.cancel()

    async def _run(self, call: CustomCall, http: aiohttp.ClientSession) -> None:
        try:
            done = await self._made(call, http)
        except asyncio.CancelledError:
            done = CustomResult(call.id, failure=TIMEOUT)
        except NoSample as error:
            done = CustomResult(call.id, failure=ERROR, text=str(error))
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            done = CustomResult(call.id, failure=ERROR, text=f"raised {said_of(error)}", trace=trace_of(error))
        self._writer.write(frame(done))
        await self._writer.drain()

    async def _made(self, call: CustomCall, http: aiohttp.ClientSession) -> CustomResult:
        engine = Engine(call.base_url, call.api_key, http)
        args = Arguments(
            self._options, engine, self._tokenizer, call.base_url, call.api_key, call.evaluation, call.version
        )
        sample = unpack(call.sample)
        sample.reward = None  # type: ignore[assignment]  # until the function sets one
        more = {"evaluation": call.evaluation} if self._told else {}
        params = dict(call.sampling_params)
        returned = await self._function(args, sample, params, **more)
        if returned is None:
            if not isinstance(sample.metadata, dict):
                raise NoSample("set metadata that is not a dict")
            return CustomResult(call.id, reward=reward_of(sample), rewards=parts_of(sample), metadata=sample.metadata)
        return CustomResult(
            call.id, samples_of(returned, self._tokenizer.vocab_size, call.sampling_params["max_new_tokens"])
        )


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 22)
    setup = msgspec.msgpack.decode(await receive(reader), type=SamplerSetup)
    options = Options.model_validate_json(setup.options)
    try:
        function = load_generate(str(options.custom_generate_function_path))
        tokenizer = load_tokenizer(options.hf_checkpoint)
    except BaseException as error:  # noqa: BLE001  (the user's module may raise anything)
        what, hint = (
            (error.what, error.hint) if isinstance(error, HpcrlError) else (f"{type(error).__name__}: {error}", "")
        )
        trace = "" if error.__cause__ is None else trace_of(error.__cause__)
        writer.write(frame(FunctionLoaded(error=what, hint=hint, trace=trace)))
        await writer.drain()
        return
    writer.write(frame(FunctionLoaded()))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await RunningCalls(options, function, tokenizer, writer).serve(reader)


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.dup2(2, 1)  # what a function prints
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        asyncio.run(serve(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # threads that a function has left behind are not waited for


if __name__ == "__main__":
    main()
