"""Whether an engine works: while its core is at a long call, and how long something has been stopped."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.engine.health import CoreCalls, StoppedProcess
from hpcrl.engine.membership.http import CORE, IS_PAUSED, LATE, PATIENCE, TURN, request_json
from tests.support.engines import PROMPT, Engines, generate
from tests.support.runs import gone
from tests.support.tiny import make_model


@dataclass
class Process:
    pid: int
    state: str = psutil.STATUS_RUNNING

    def status(self) -> str:
        if self.state == psutil.STATUS_DEAD:
            raise psutil.NoSuchProcess(self.pid)
        return self.state


def test_who_has_been_stopped_and_for_how_long() -> None:
    at = [0.0]
    first = Process(11)
    second = Process(12)
    stopped = StoppedProcess(lambda: [first, second], lambda: at[0])

    def look(seconds: float) -> tuple[int, float] | None:
        at[0] += seconds
        return stopped.longest()

    assert look(0) is None
    first.state = psutil.STATUS_STOPPED
    assert look(1) is None, "it is not yet time to look"
    assert look(1) == (11, 0)
    second.state = psutil.STATUS_TRACING_STOP
    assert look(10) == (11, 10)
    first.state = psutil.STATUS_SLEEPING
    assert look(2) == (12, 2)
    first.state = psutil.STATUS_STOPPED
    second.state = psutil.STATUS_DEAD
    assert look(2) == (11, 0), "what went on begins anew"
    assert look(100) == (11, 0), "nobody looked: whoever looks was perhaps stopped with it"


class Core:
    """vLLM's application, as far as it matters here: one call at a time, and the core's question waits for it."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.free.wait()
        await send({"type": "http.response.start", "status": 200, "path": scope["path"]})
        await send({"type": "http.response.body", "body": b"{}"})


async def asked(app: CoreCalls, path: str, **headers: str) -> dict[str, Any]:
    """The head of the answer, with its body."""
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": given}
    await asyncio.wait_for(app(scope, None, send), 20)  # type: ignore[arg-type]
    return said[0] | {"body": said[1]["body"]}


def test_server_answers_for_a_busy_core() -> None:
    """A server answers for its core while the core is busy with a call."""

    async def go() -> None:
        core = Core()
        app = CoreCalls(core)
        core.free.set()
        answer = await asked(app, CORE)
        assert (answer["status"], answer["path"]) == (200, IS_PAUSED), "the core itself answers"
        core.free.clear()
        waiting = asyncio.create_task(asked(app, CORE))
        await asyncio.sleep(0)
        for path, patience, status in (
            ("/collective_rpc", "600", 200),
            (TURN, "0.01", LATE),
            ("/update_weights", "600", 200),
        ):
            call = asyncio.create_task(asked(app, path, **{PATIENCE: patience}))
            await asyncio.sleep(0.05)
            answer = await asked(app, CORE)
            assert answer["status"] == status and path in answer["body"].decode()
            if waiting is not None:
                answer = await asyncio.wait_for(waiting, 5)
                assert "path" not in answer, "a question that came before the call is answered too"
                waiting = None
            core.free.set()
            await call
            core.free.clear()
        sampling = [
            asyncio.create_task(asked(app, path, **headers))
            for path, headers in (("/generate", {PATIENCE: "9"}), (TURN, {}))
        ]
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(asked(app, CORE))
        _, late = await asyncio.wait([waiting], timeout=0.5)
        assert late, "neither sampling nor a call of somebody who does not say how long he waits counts"
        core.free.set()
        await asyncio.gather(*sampling, waiting)

    asyncio.run(go())


@pytest.mark.vllm
def test_call_lasts_as_long_as_its_caller_waits(tmp_path: Path) -> None:
    """vLLM's core answers nothing during one, and its HTTP server answers all the same when the core hangs."""
    model = make_model(tmp_path / "model", tied=True)
    engines = Engines(tmp_path / "run", model, module="tests.support.breakable", rollout_health_check_timeout=3)
    address = engines.address()
    request_json(address, "POST", "/collective_rpc", 60, {"method": "take_long", "args": ["6"]})
    assert len(generate(address, PROMPT, 4)["token_ids"]) == 4
    pids, begun = engines.pids(), time.monotonic()
    with pytest.raises(Exception, match="no answer within 3 s"):
        request_json(address, "POST", "/collective_rpc", 3, {"method": "take_long", "args": ["600"]})
    code, message = engines.ended()
    assert code != 0 and time.monotonic() - begun < 60
    assert "engine 0 on 127.0.0.1" in message and "busy with /collective_rpc for" in message
    assert gone(pids)
