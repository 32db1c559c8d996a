"""Our own route to an engine (`hpcrl.transport.token_frames`): samples of one prompt in one request, delivered as they
finish.

Invariant: what comes back is checked before it is delivered; a refusal, and bytes that are not an answer, are errors
that name the engine.
"""

from __future__ import annotations

from dataclasses import replace

import aiohttp

from hpcrl.errors import PeerError
from hpcrl.rollout.engines.completion import (
    Deliver,
    ExpectedAnswer,
    PassingTrouble,
    PromptRequest,
    check,
    garbage,
    read_experts,
)
from hpcrl.rollout.engines.engine_pool import PooledEngine
from hpcrl.transport import token_frames
from hpcrl.transport.token_frames import FrameReader, GroupRequest, SampleAnswer, encode

PATH = token_frames.GENERATE
_BYTES = {"Content-Type": "application/octet-stream"}
_TIMEOUT = aiohttp.ClientTimeout(total=30)


async def request_samples(
    engine: PooledEngine, request: PromptRequest, wanted: ExpectedAnswer, deliver: Deliver
) -> None:
    """Ask `engine` for all samples of `request`.

    Raises:
        PeerError: if it refuses or answers garbage; PassingTrouble or aiohttp.ClientError for what may be tried again.
    """
    calls = request.calls
    body = GroupRequest(
        [call.ident for call in calls],
        [call.seed for call in calls],
        request.prompt.astype("<i4", copy=False).tobytes(),
        request.sampling.params(request.max_tokens, request.partial_tokens),
    )
    reader, there = FrameReader(), [False] * len(calls)
    async with engine.session.post(engine.at(PATH), data=encode(body), headers=_BYTES) as answer:
        if answer.status != 200:
            refuse(engine, answer.status, await answer.read())
        while data := await answer.content.readany():
            try:
                found = list(reader.feed(data))
            except ValueError as error:
                raise garbage(engine, f"what is not a completion: {type(error).__name__}: {error}") from error
            for one in found:
                if not 0 <= one.index < len(calls) or there[one.index]:
                    raise garbage(
                        engine, f"sample {one.index} of {len(calls)}, which was not asked for or had come before"
                    )
                there[one.index] = True
                _deliver(engine, request, one, wanted, deliver)
    if reader.rest or not all(there):
        raise garbage(engine, f"{sum(there)} of the {len(calls)} samples that were asked for")


def _deliver(
    engine: PooledEngine, request: PromptRequest, answer: SampleAnswer, wanted: ExpectedAnswer, deliver: Deliver
) -> None:
    if answer.reason == "error":
        raise PassingTrouble(answer.error)
    try:
        tokens, logprobs = answer.arrays()
    except ValueError as error:
        raise garbage(engine, f"what is not a completion: {error}") from error
    completion = check(engine, wanted, answer.reason, tokens, logprobs, answer.spans)
    if (routing := request.sampling.routing) is not None and len(tokens):
        read = len(request.prompt) + len(tokens) - 1
        completion = replace(completion, experts=read_experts(engine, answer.experts, answer.routing, read, routing))
    deliver(request.calls[answer.index], completion)


def refuse(engine: PooledEngine, status: int, data: bytes) -> None:
    """Raise for an answer that is not 200: PassingTrouble for the server's own troubles, PeerError for a refusal."""
    trouble = f"HTTP {status}: {data[:300].decode(errors='replace')}"
    if status < 500:
        raise PeerError(f"{engine} refused {PATH}: {trouble}", f"see {engine.log}")
    raise PassingTrouble(trouble)


async def abort(engine: PooledEngine, idents: list[str]) -> None:
    """Have `engine` end the samples with these names; those that it does not know, it ignores."""
    async with engine.session.post(
        engine.at(token_frames.ABORT), data=encode(idents), headers=_BYTES, timeout=_TIMEOUT
    ) as answer:
        await answer.read()
