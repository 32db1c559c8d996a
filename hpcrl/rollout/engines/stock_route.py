"""vLLM's own route for token ids: one sample a request, JSON both ways.  For engines that lack ours.

Invariant: what comes back is checked before it is delivered; a refusal is an error that names the engine.
"""

from __future__ import annotations

import aiohttp
import msgspec
import numpy as np

from hpcrl.errors import PeerError
from hpcrl.rollout.engines.completion import (
    Completion,
    Deliver,
    ExpectedAnswer,
    PassingTrouble,
    PromptRequest,
    check,
    garbage,
)
from hpcrl.rollout.engines.engine_pool import PooledEngine

PATH, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
PREFIX = "generate-tokens-"  #: what vLLM puts before a request's name
_JSON = {"Content-Type": "application/json"}


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    """Output tokens [start, end) were sampled under the weights called `version`."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Answer)


async def ask(engine: PooledEngine, request: PromptRequest, wanted: ExpectedAnswer, deliver: Deliver) -> None:
    """Ask `engine` for the one sample of `request`.

    Raises:
        PeerError: if it refuses or answers garbage; PassingTrouble or aiohttp.ClientError for what may be tried again.
    """
    (call,) = request.calls
    if request.sampling.routing is not None:
        raise PeerError(
            f"{engine} has no route for the experts that --use-rollout-routing-replay asks for", f"see {engine.log}"
        )
    params = request.sampling.params(request.max_tokens, request.begun)
    if call.seed is not None:
        params["seed"] = call.seed
    body = {
        "model": "policy",
        "token_ids": request.prompt.tolist(),
        "sampling_params": params,
        "request_id": call.ident,
    }
    async with engine.session.post(engine.at(PATH), data=msgspec.json.encode(body), headers=_JSON) as answer:
        status, data = answer.status, await answer.read()
    refuse(engine, PATH, status, data)
    deliver(call, _read(engine, data, wanted))


def refuse(engine: PooledEngine, path: str, status: int, data: bytes) -> None:
    """Raise for an answer that is not 200: PassingTrouble for the server's own troubles, PeerError for a refusal."""
    if status == 200:
        return
    trouble = f"HTTP {status}: {data[:300].decode(errors='replace')}"
    if status < 500:
        raise PeerError(f"{engine} refused {path}: {trouble}", f"see {engine.log}")
    raise PassingTrouble(trouble)


async def abort(engine: PooledEngine, idents: list[str]) -> None:
    """Have `engine` end the samples with these names; those that it does not know, it ignores."""
    body = msgspec.json.encode({"request_ids": [PREFIX + ident for ident in idents]})
    async with engine.session.post(engine.at(ABORT), data=body, headers=_JSON, timeout=_TIMEOUT) as answer:
        await answer.read()


_TIMEOUT = aiohttp.ClientTimeout(total=30)


def _read(engine: PooledEngine, data: bytes, wanted: ExpectedAnswer) -> Completion:
    try:
        choice = _DECODER.decode(data).choices[0]
        tokens = np.asarray(choice.token_ids, np.int64)
    except (msgspec.MsgspecError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise garbage(engine, f"what is not a completion: {type(error).__name__}: {error}") from error
    content = choice.logprobs.content if choice.logprobs else None
    if content is None and not choice.token_ids:
        content = []
    if content is not None and [entry.token_id for entry in content] != choice.token_ids:
        content = None
    logprobs = None if content is None else np.asarray([entry.logprob for entry in content])
    spans = ((span.version, span.start, span.end) for span in choice.weight_versions or ())
    return check(engine, wanted, choice.finish_reason, tokens, logprobs, spans)
