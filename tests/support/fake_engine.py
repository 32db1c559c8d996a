"""A server that speaks /inference/v1/generate and our own route, and misbehaves on request: what a real vLLM cannot be
made to do.

The tokens it answers depend on prompt and seed alone, as an engine's do.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web

from hpcrl.run.rundir import RunDir
from hpcrl.transport import token_frames
from hpcrl.transport.auth import http_key
from hpcrl.transport.token_frames import SampleAnswer

#: an answer that closes the connection instead
CUT = object()
#: what to answer to request number `count` (from 0) with `body`; None: a good answer
Script = Callable[["FakeEngine", int, dict[str, Any]], Any]


def good(body: dict[str, Any], version: str | None = None) -> dict[str, Any]:
    """What vLLM would answer, as far as the rollout process reads it; printable characters of the tiny tokenizer."""
    params = body["sampling_params"]
    chance = random.Random(f"{body['token_ids']}/{params.get('seed')}")
    count = chance.randint(1, params["max_tokens"])
    ids = [chance.randrange(6, 100) for _ in range(count)]
    content = [{"token_id": i, "logprob": -chance.random(), "rank": 1, "top_logprobs": []} for i in ids]
    return {
        "request_id": "x",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length" if count == params["max_tokens"] else "stop",
                "token_ids": ids,
                "logprobs": {"content": content} if params.get("logprobs") == 0 else None,
                "weight_versions": [{"version": version, "start": 0, "end": count}] if version else None,
            }
        ],
    }


def partial(body: dict[str, Any], count: int) -> dict[str, Any]:
    """What vLLM answers of a request that was aborted after `count` tokens: the first of those that it would have
    had."""
    answer = good(body)
    choice = answer["choices"][0]
    choice["finish_reason"] = "abort"
    choice["token_ids"] = choice["token_ids"][:count]
    if choice["logprobs"]:
        choice["logprobs"]["content"] = choice["logprobs"]["content"][:count]
    return answer


def packed(answer: dict[str, Any]) -> bytes:
    """One of vLLM's answers as our own route has it."""
    choice = answer["choices"][0]
    content = (choice["logprobs"] or {}).get("content") or []
    spans = [(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or ()]
    tokens = np.asarray(choice["token_ids"], "<i4").tobytes()
    logprobs = np.asarray([entry["logprob"] for entry in content], "<f4").tobytes()
    return token_frames.encode(SampleAnswer(choice["finish_reason"], tokens, logprobs, spans))


async def until_aborted(engine: FakeEngine, count: int, body: dict[str, Any]) -> dict[str, Any]:
    """Work until the request is aborted, then answer with its first token."""
    await engine.aborted(body["request_id"])
    return partial(body, 1)


def keys_of(rundir: RunDir) -> frozenset[str]:
    """The keys of a run's first engines in their first lives: a fake one does not know which it is."""
    return frozenset(http_key(rundir, index, incarnation) for index in range(8) for incarnation in range(8))


class FakeEngine:
    """One server on 127.0.0.1, in a thread of its own."""

    def __init__(self, script: Script | None = None, keys: frozenset[str] | None = None) -> None:
        self.script = script
        self.key = keys
        self.healthy = True
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.version = "default"  #: what its weights are called
        self.deaf = 0  #: aborts that it takes no notice of
        self._aborts: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = self._do(self._start())

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post("/update_weight_version", self._name)
        app.router.add_post(token_frames.GENERATE, self._generate_sample)
        app.router.add_post(token_frames.ABORT, self._abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    def die(self) -> None:
        """Cut all connections and listen no more; once."""
        if self._runner is not None:
            runner = self._runner
            self._runner = None
            self._do(runner.cleanup())

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _name(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def aborted(self, ident: str) -> None:
        """Return once the request with this name is aborted."""
        await self._aborts.setdefault(ident, asyncio.Event()).wait()

    async def _abort(self, request: web.Request) -> web.Response:
        if self.deaf:
            self.deaf -= 1
            return web.Response()
        data = await request.read()
        lean = request.path == token_frames.ABORT
        for name in token_frames.read_names(data) if lean else json.loads(data)["request_ids"]:
            if found := self._aborts.get(
                name.removeprefix("generate-tokens-")
            ):  # vLLM ignores names that it does not know
                found.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        answer = await self._answer(body)
        if answer is CUT:
            request.transport.abort()
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(good(body) if answer is CUT else answer)

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key is not None and request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.key:
            return web.json_response({"error": "the key"}, status=401)
        return None

    async def _answer(self, body: dict[str, Any]) -> Any:
        """What the script says to one sample, or a good answer."""
        count = len(self.bodies)
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.script(self, count, body) if self.script else None
            if asyncio.iscoroutine(answer):
                answer = await answer
            return good(body) if answer is None else answer
        finally:
            self.in_flight -= 1

    async def _generate_sample(self, request: web.Request) -> web.StreamResponse:
        """The same on our own route."""
        if (refused := self._refused(request)) is not None:
            return refused
        asked = token_frames.read_request(await request.read())
        prompt = np.frombuffer(asked.prompt, "<i4").tolist()
        answer = await self._answer({"token_ids": prompt, "sampling_params": asked.params, "request_id": asked.name})
        if answer is CUT:
            request.transport.abort()
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(body=b"" if answer is CUT else answer if isinstance(answer, bytes) else packed(answer))


async def hang(engine: FakeEngine, count: int, body: dict[str, Any]) -> None:
    """Never answer."""
    await asyncio.sleep(3600)
