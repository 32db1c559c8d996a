"""Our own route next to vLLM's (`hpcrl.transport.token_frames`): the samples of a group in one request, raw arrays as
each of them finishes.

It stands between the guard of the run's key and vLLM's application, and uses the same engine client as vLLM's own
routes do: what is sampled, and under which weights, is up to vLLM.

Invariants: every sample is a request of its own to the engine, with its own seed, so the result does not depend on what
it is sent with; when a client disconnects, its samples are aborted; a sample that is ended early is answered with the
tokens that it has.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.engine.adapter_requests import attach_adapter
from hpcrl.engine.routed_experts import Experts, ExpertSource, asks_for_experts
from hpcrl.models.lora.serving import ENVIRONMENT
from hpcrl.transport.token_frames import ABORT, GENERATE, SampleAnswer, frame, read_names, read_request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LeanRoute:
    """ASGI middleware that answers our paths itself and leaves all others to vLLM."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._ours: dict[str, Callable[[AsyncLLM, Receive, Send], Awaitable[None]]]
        self._ours = {GENERATE: partial(generate, ExpertSource()), ABORT: abort}
        self._adapter = ENVIRONMENT in os.environ

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._adapter and scope["type"] == "http":
            attach_adapter(scope["app"].state.engine_client)
        ours = self._ours.get(scope["path"]) if scope["type"] == "http" else None
        if ours is None:
            await self.app(scope, receive, send)
        elif scope["method"] != "POST":
            await _text(send, 405, "POST it")
        else:
            await ours(scope["app"].state.engine_client, receive, send)


async def abort(client: AsyncLLM, receive: Receive, send: Send) -> None:
    """End samples by their names; 400 for a malformed body."""
    try:
        names = read_names(await _body(receive))
    except ValueError as error:
        return await _text(send, 400, str(error))
    await client.abort(names)
    return await _text(send, 200, "")


async def generate(source: ExpertSource, client: AsyncLLM, receive: Receive, send: Send) -> None:
    """Answer a GroupRequest; 400 for one that vLLM refuses, 500 if the engine is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        request, prompt = read_request(await _body(receive))
        params = sampling_params(request.params)
    except (ValueError, TypeError) as error:
        return await _text(send, 400, f"{type(error).__name__}: {error}")
    queues: list[RequestOutputCollector] = []
    experts = Experts(source, client, len(prompt)) if asks_for_experts(params) else None
    try:
        if experts is not None:
            await source.open(client)
        for name, seed in zip(request.names, request.seeds, strict=True):
            queues.append(await _add(client, name, prompt, params, seed))
    except EngineDeadError as error:
        return await _text(send, 500, f"the engine is dead: {error}")
    except ValueError as error:  # vLLM's refusals are ValueErrors
        await _abort_requests(client, queues)
        return await _text(send, 400, str(error))
    except BaseException:
        await _abort_requests(client, queues)
        raise
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/octet-stream")]}
    )
    return await ResponseStream(client, queues, send, experts).run(receive)


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """vLLM's, for one answer at the end of each sample.

    Raises:
        ValueError, TypeError: if it refuses them.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # flat: one list of log-probs a sample instead of two objects a token; not cloned deeply: there is no other holder
    params = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
    params.skip_clone = True
    return params


async def _add(
    client: AsyncLLM, name: str, prompt: list[int], params: SamplingParams, seed: int | None
) -> RequestOutputCollector:
    from vllm.inputs import tokens_input

    own = copy.copy(params)
    own.seed = seed
    return await client.add_request(name, tokens_input(prompt), own)


async def _abort_requests(client: AsyncLLM, queues: list[RequestOutputCollector]) -> None:
    if queues:
        await client.abort([queue.request_id for queue in queues], internal=True)


class ResponseStream:
    """One answer on its way: frames of the samples, those that finish in one turn of the event loop in one piece."""

    def __init__(
        self, client: AsyncLLM, queues: list[RequestOutputCollector], send: Send, experts: Experts | None = None
    ) -> None:
        self._client = client
        self._queues = queues
        self._send = send
        self._experts = experts
        self._ready: list[bytes] = []
        self._more = asyncio.Event()
        self._gone = False

    async def run(self, receive: Receive) -> None:
        """Send all of them, or stop when the client has gone."""
        waiting = [asyncio.create_task(self._wait(index)) for index in range(len(self._queues))]
        watch = asyncio.create_task(self._watch(receive))
        left = len(waiting)
        try:
            while left and not self._gone:
                await self._more.wait()
                self._more.clear()
                ready = self._ready
                self._ready = []
                left -= len(ready)
                if ready and not self._gone:
                    await self._send({"type": "http.response.body", "body": b"".join(ready), "more_body": left > 0})
        finally:
            watch.cancel()
            unfinished = [queue for queue, task in zip(self._queues, waiting, strict=True) if not task.done()]
            for task in waiting:
                task.cancel()
            await _abort_requests(self._client, unfinished)
            if self._experts is not None:
                await self._experts.forget([queue.request_id for queue in unfinished])

    async def _wait(self, index: int) -> None:
        """The frame of one sample, once it has ended."""
        try:
            output = await self._queues[index].get()
            answer = answer_of(index, output.outputs[0])  # type: ignore[union-attr]
            if self._experts is not None:
                name = self._queues[index].request_id
                answer.routing, answer.experts = await self._experts.table_of(name, output.outputs[0])  # type: ignore[union-attr]
        except Exception as error:  # noqa: BLE001  (the client is to hear of it)
            answer = SampleAnswer(index, "error", error=f"{type(error).__name__}: {error}")
        self._ready.append(frame(answer))
        self._more.set()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._more.set()


def answer_of(index: int, output: CompletionOutput) -> SampleAnswer:
    """A finished sample as it goes over the wire; its log-probs are those of the sampled tokens, which vLLM puts
    first."""
    logprobs: Any = output.logprobs
    values = b""
    if logprobs is not None:
        flat = logprobs.logprobs
        if len(flat) != len(logprobs.start_indices):
            flat = [flat[at] for at in logprobs.start_indices]
        values = np.asarray(flat, "<f4").tobytes()
    spans = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
    return SampleAnswer(index, output.finish_reason or "", np.asarray(output.token_ids, "<i4").tobytes(), values, spans)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the client has gone")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _text(send: Send, status: int, text: str) -> None:
    body = text.encode()
    head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
