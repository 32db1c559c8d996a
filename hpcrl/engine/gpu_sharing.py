"""The engine's side of the hand-over of shared GPUs (`hpcrl.weights.colocation`): it sleeps and wakes on command, and
answers no request while the trainer has the GPUs.

    POST /hpcrl/turn {"event": "sleep" | "take" | "wake-weights" | ...}   -> {"state": ..., "bytes": freed or allocated}

ASGI middleware between the guard of the run's key and vLLM's application.

Invariants: an event that the hand-over does not allow is refused (409) and changes nothing; a request that would start
work is refused while the trainer has the GPUs, as vLLM would accept it and answer when it wakes; vLLM's own routes for
sleeping and pausing are closed.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

from hpcrl.engine.key_guard import JSON, App, Receive, Scope, Send, body_of, reply
from hpcrl.engine.membership.http import TURN
from hpcrl.transport.token_frames import ABORT
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.colocation import EnginesHold, Event, HandOver, OutOfTurn

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SLEEP_LEVEL = "HPCRL_SLEEP_LEVEL"  #: vLLM's level of sleep; 0: only paused
ON_CPU = "HPCRL_SLEEPS_ON_CPU"  #: 1 where vLLM's sleep frees nothing
DRAIN = 30.0  #: seconds that requests which have been answered may take to end

OWNED = {"/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume"}  #: the hand-over does that
UPDATES = {"/start_weight_update", "/update_weights", "/finish_weight_update"}  #: with memory for the weights alone
#: what neither computes nor needs memory
ALWAYS = {
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/update_weight_version",
    "/inference/v1/abort_requests",
    ABORT,
}


class GpuSharingMiddleware:
    """The middleware; one in each server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.mine = HandOver("the engine")
        self.level = int(os.environ[SLEEP_LEVEL])
        self.on_cpu = os.environ.get(ON_CPU) == "1"
        self._changing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["method"] == "GET"):
            return await self.app(scope, receive, send)
        path = scope["path"]
        if path == TURN:
            return await self._turn(scope, receive, send)
        if path in ALWAYS:
            return await self.app(scope, receive, send)
        if path in OWNED or (path in UPDATES and self.mine.at.engines != EnginesHold.WEIGHTS):
            return await _refuse(scope, send, f"{path} is out of turn: {self.mine.at}")
        if path in UPDATES:
            return await self.app(scope, receive, send)
        return await self._work(scope, receive, send)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that makes the engine compute."""
        try:
            self.mine.tell(Event.SEND)
        except OutOfTurn as error:
            return await _refuse(scope, send, str(error))
        try:
            await self.app(scope, receive, send)
        finally:
            self.mine.tell(Event.ANSWER)

    async def _turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            event = Event(json.loads(await body_of(receive))["event"])
            if event in (Event.SEND, Event.ANSWER):
                raise ValueError(f"{event} is counted here")
        except (ValueError, KeyError, TypeError) as error:
            return await _json(send, 400, {"error": f"{type(error).__name__}: {error}"})
        async with self._changing:
            try:
                if event == Event.SLEEP:
                    await self._drained()
                self.mine.tell(event)
            except OutOfTurn as error:
                return await _refuse(scope, send, str(error))
            found = await self._do(event, scope["app"].state.engine_client)
        return await _json(send, 200, {"state": str(self.mine.at), "bytes": found})

    async def _drained(self) -> None:
        """Wait for requests whose answers are already being sent."""
        deadline = Deadline(DRAIN)
        while self.mine.at.requests and not deadline.over:
            await asyncio.sleep(0.01)

    async def _do(self, event: Event, client: AsyncLLM) -> int:
        """Free or allocate memory; returns the bytes, which are counted on a CPU only."""
        if event == Event.SLEEP:
            await client.sleep(self.level, mode="abort")
            return await self._on_cpu(client, "hpcrl_give_memory_back", self.level)
        if event == Event.WAKE_WEIGHTS and self.level:
            await client.wake_up(["weights"])
        if event == Event.WAKE:
            await client.wake_up(["kv_cache"] if self.level else ["scheduling"])
        return 0

    async def _on_cpu(self, client: AsyncLLM, method: str, *args: Any) -> int:
        if not (self.on_cpu and self.level):
            return 0
        return sum(await client.collective_rpc(method, args=args))


async def _refuse(scope: Scope, send: Send, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": text[:120]})
        return
    await _json(send, 409, {"error": text})


async def _json(send: Send, status: int, found: dict[str, Any]) -> None:
    await reply(send, status, JSON, json.dumps(found).encode())
