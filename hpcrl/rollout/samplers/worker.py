"""A process that runs the custom function: many calls at once, until its socket closes.

    python -m hpcrl.rollout.samplers.worker FD        (started by worker_pool.py; FD is its end of a socket pair)

Invariants: it dies with the rollout process; what a function prints goes to the rollout's log and never into the
protocol; what a function does or returns ends its own call alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from hpcrl.config.custom_functions import is_async, said_of, takes, trace_of
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import load_own, spelled
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.grading.frames import receive_sample
from hpcrl.rollout.prompts.tokenizer import Tokenizer, load_tokenizer
from hpcrl.rollout.samplers.conversation import Arguments, Engine
from hpcrl.rollout.samplers.frames import ERROR, TIMEOUT, Call, Cancel, Done, Ready, Setup
from hpcrl.rollout.samplers.returned import NoSample, parts_of, reward_of, samples_of
from hpcrl.rollout.worker_process import frame, receive
from hpcrl.run.process import die_with_parent

OPTION = "custom_generate_function_path"
_REQUESTS = msgspec.msgpack.Decoder(Call | Cancel)


def load_generate(path: str) -> Callable[..., Any]:
    """The function of --custom-generate-function-path.  UsageError if it cannot be used."""
    function = load_own(OPTION, path)
    if not is_async(function):
        raise UsageError(
            f"{spelled(OPTION)} {path} is not async", "declare it: async def generate(args, sample, sampling_params)"
        )
    return function


class Work:
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
                if isinstance(request, Call):
                    task = asyncio.create_task(self._run(request, http))
                    self._running[request.id] = task
                    task.add_done_callback(lambda _, number=request.id: self._running.pop(number, None))
                elif task := self._running.get(request.id):
                    task.cancel()

    async def _run(self, call: Call, http: aiohttp.ClientSession) -> None:
        try:
            done = await self._made(call, http)
        except asyncio.CancelledError:
            done = Done(call.id, failure=TIMEOUT)
        except NoSample as error:
            done = Done(call.id, failure=ERROR, text=str(error))
        except BaseException as error:  # noqa: BLE001  (whatever the user's function does)
            done = Done(call.id, failure=ERROR, text=f"raised {said_of(error)}", trace=trace_of(error))
        self._writer.write(frame(done))
        await self._writer.drain()

    async def _made(self, call: Call, http: aiohttp.ClientSession) -> Done:
        engine = Engine(call.base_url, call.api_key, http)
        args = Arguments(
            self._options, engine, self._tokenizer, call.base_url, call.api_key, call.evaluation, call.version
        )
        sample = receive_sample(call.sample)
        sample.reward = None  # type: ignore[assignment]  # until the function sets one
        more = {"evaluation": call.evaluation} if self._told else {}
        params = dict(call.sampling_params)
        returned = await self._function(args, sample, params, **more)
        if returned is None:
            if not isinstance(sample.metadata, dict):
                raise NoSample("set metadata that is no dict")
            return Done(call.id, reward=reward_of(sample), rewards=parts_of(sample), metadata=sample.metadata)
        return Done(call.id, samples_of(returned, self._tokenizer.vocab_size, call.sampling_params["max_new_tokens"]))


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 22)
    setup = msgspec.msgpack.decode(await receive(reader), type=Setup)
    options = Options.model_validate_json(setup.options)
    try:
        function = load_generate(str(options.custom_generate_function_path))
        tokenizer = load_tokenizer(options.hf_checkpoint)
    except BaseException as error:  # noqa: BLE001  (the user's module may raise anything)
        what, hint = (
            (error.what, error.hint) if isinstance(error, HpcrlError) else (f"{type(error).__name__}: {error}", "")
        )
        trace = "" if error.__cause__ is None else trace_of(error.__cause__)
        writer.write(frame(Ready(error=what, hint=hint, trace=trace)))
        await writer.drain()
        return
    writer.write(frame(Ready()))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        await Work(options, function, tokenizer, writer).serve(reader)


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
