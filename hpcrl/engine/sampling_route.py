"""Our own route next to vLLM's (`hpcrl.transport.token_frames`): a sample a request, raw arrays in its answer.

It stands between the guard of the run's key and vLLM's application, and uses the same engine client as vLLM's own
routes do: what is sampled, and under which weights, is up to vLLM.

Invariants: when a client disconnects, its sample is aborted; a sample that is ended early is answered with the tokens
that it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.engine.key_guard import App, Receive, Scope, Send, body_of, reply
from hpcrl.engine.routed_experts import Experts, ExpertSource, asks_for_experts
from hpcrl.models.lora.serving import ENVIRONMENT
from hpcrl.transport.token_frames import ABORT, GENERATE, SampleAnswer, encode, read_names, read_request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
import secrets
from typing import TYPE_CHECKING

from hpcrl.models.lora.serving import NAME, NUMBER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


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
        names = read_names(await body_of(receive))
    except ValueError as error:
        return await _text(send, 400, str(error))
    await client.abort(names)
    return await _text(send, 200, "")


async def generate(source: ExpertSource, client: AsyncLLM, receive: Receive, send: Send) -> None:
    """Answer a SampleRequest; 400 for one that vLLM refuses, 500 if the engine fails."""
    from vllm.inputs import tokens_input
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        request = read_request(await body_of(receive))
        prompt = np.frombuffer(request.prompt, "<i4").tolist()
        params = sampling_params(request.params)
    except (ValueError, TypeError) as error:
        return await _text(send, 400, f"{type(error).__name__}: {error}")
    experts = Experts(source, client, len(prompt)) if asks_for_experts(params) else None
    try:
        if experts is not None:
            await source.open(client)
        queue = await client.add_request(request.name, tokens_input(prompt), params)
    except EngineDeadError as error:
        return await _text(send, 500, f"the engine is dead: {error}")
    except ValueError as error:  # vLLM's refusals are ValueErrors
        return await _text(send, 400, str(error))
    try:
        body = await _until_gone(_answer(queue, experts), receive)
    except Exception as error:  # noqa: BLE001  (the client is to hear of it)
        return await _text(send, 500, f"{type(error).__name__}: {error}")
    except BaseException:
        await _drop(client, queue, experts)
        raise
    if body is None:
        return await _drop(client, queue, experts)
    return await reply(send, 200, b"application/octet-stream", body)


async def _answer(queue: RequestOutputCollector, experts: Experts | None) -> bytes:
    """The body of the answer, once the sample has ended."""
    output = (await queue.get()).outputs[0]  # type: ignore[union-attr]
    answer = answer_of(output)
    if experts is not None:
        answer.routing, answer.experts = await experts.table_of(queue.request_id, output)
    return encode(answer)


async def _until_gone(work: Coroutine[Any, Any, bytes], receive: Receive) -> bytes | None:
    """The result of `work`; None if the client goes away before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(receive())  # the body has come: the next message is that the client has gone
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _drop(client: AsyncLLM, queue: RequestOutputCollector, experts: Experts | None) -> None:
    await client.abort([queue.request_id], internal=True)
    if experts is not None:
        await experts.forget(queue.request_id)


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """vLLM's, for one answer at the end of the sample.

    Raises:
        ValueError, TypeError: if it refuses them.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # flat: one list of log-probs a sample instead of two objects a token; not cloned deeply: there is no other holder
    params = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)
    params.skip_clone = True
    return params


def answer_of(output: CompletionOutput) -> SampleAnswer:
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
    return SampleAnswer(output.finish_reason or "", np.asarray(output.token_ids, "<i4").tobytes(), values, spans)


async def _text(send: Send, status: int, text: str) -> None:
    await reply(send, status, b"text/plain; charset=utf-8", text.encode())


# ---- requests for an adapter
#
# Every request of an engine with an adapter is computed under it, though there are no files of it to name.
#
# Invariant: what a cache that is shared, or outlives this process, has computed under an adapter of another is not
# used.


#: in place of a path to an adapter's files, which do not exist: an engine without the adapter ends by looking for them
COMES_LATER = f"updates bring it: {secrets.token_hex(8)}"  #: vLLM tells what it has computed of prompts by it


def attach_adapter(client: AsyncLLM) -> None:
    """From now on every request is computed under the adapter that updates bring, whichever route it came by."""
    from vllm.lora.request import LoRARequest

    if vars(client).get("add_request") is not None:
        return
    given, adapter = client.add_request, LoRARequest(NAME, NUMBER, COMES_LATER)

    async def add_request(*args: Any, **kwargs: Any) -> RequestOutputCollector:
        return await given(*args, **kwargs | {"lora_request": adapter})

    client.add_request = add_request  # type: ignore[method-assign]
