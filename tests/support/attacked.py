"""Servers of a run for strangers to attack, each in a process of its own with few descriptors.

    python -m tests.support.attacked queue|engine|endpoint DIRECTORY

The process prints what its peers need as one line of JSON, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpcrl.engine.http_limits import bounded_protocol
from hpcrl.engine.key_guard import KEY_FILE, RunKeyGuard, read_key
from hpcrl.queue.client import QueueClient
from hpcrl.rollout.endpoint.server import Endpoint
from hpcrl.run.peers import RolloutPeer, find
from hpcrl.run.rundir import RunDir
from tests.support.children import read_line
from tests.support.queues import PLAN, WAIT, Served, make_rundir

REPO = Path(__file__).parents[2]
HERE = "127.0.0.1"
FILES = 4_096  #: descriptors of a server: the hard limit of old systems


@dataclass
class Attacked:
    """A server's process, and one honest peer of it.

    Attributes:
        call: asks something and waits for the answer.
        again: makes a new peer, which does the same once.
        resting: bytes of memory before any attack.
        key: of a server of HTTP.
    """

    process: subprocess.Popen[str]
    port: int
    call: Callable[[], object]
    again: Callable[[], object]
    resting: int = 0
    key: str = ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)


def start(kind: str, directory: Path) -> Attacked:
    """A server of that kind with a peer that it has answered."""
    command = [sys.executable, "-m", "tests.support.attacked", kind, str(directory)]
    process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = json.loads(read_line(process))
    found = _queue(process, told, directory) if kind == "queue" else _http(process, told)
    for _ in range(30):
        found.call()
    found.resting = psutil.Process(process.pid).memory_info().rss
    return found


def _queue(process: subprocess.Popen[str], told: dict[str, Any], directory: Path) -> Attacked:
    rundir = RunDir(directory, 0)

    def rank(number: int) -> QueueClient:
        return QueueClient(rundir, PLAN, number, 2, WAIT)

    def again() -> None:
        new = rank(1)
        new.call("echo")
        new.close()

    first = rank(0)
    return Attacked(process, told["port"], lambda: first.call("echo", text="y" * 100), again)


def _http(process: subprocess.Popen[str], told: dict[str, Any]) -> Attacked:
    headers = {"Authorization": f"Bearer {told['key']}"}

    def connection() -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HERE, told["port"], timeout=WAIT)

    def ask(over: http.client.HTTPConnection, again: bool = True) -> None:
        try:
            over.request("GET", "/v1/models", headers=headers)
            answer = over.getresponse()
        except http.client.RemoteDisconnected:  # it was idle for too long between two attacks
            over.close()
            if not again:
                raise
            ask(over, again=False)
            return
        answer.read()
        assert answer.status == 200

    first = connection()
    return Attacked(process, told["port"], lambda: ask(first), lambda: ask(connection()), key=told["key"])


def serve_queue(directory: Path) -> dict[str, Any]:
    async def echo(params: dict[str, Any]) -> dict[str, Any]:
        return {"got": params}

    peer = find(Served(make_rundir(directory), {"echo": echo}).rundir, RolloutPeer)
    assert peer is not None
    return {"port": peer.port}


def serve_engine(directory: Path) -> None:
    """uvicorn as an engine has it, around an app that answers at once."""
    import uvicorn

    directory.mkdir()
    (directory / "http.key").write_text("k" * 64)
    os.environ[KEY_FILE] = str(directory / "http.key")
    key = read_key()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    sock = socket.create_server((HERE, 0), backlog=512)
    print(json.dumps({"port": sock.getsockname()[1], "key": key.decode()}), flush=True)
    config = uvicorn.Config(
        RunKeyGuard(app), http=bounded_protocol(key, concurrency=512), lifespan="off", access_log=False
    )
    uvicorn.Server(config).run([sock])


async def serve_endpoint() -> None:
    endpoint = Endpoint(HERE)
    await endpoint.start()
    key = endpoint.open(object())  # type: ignore[arg-type]
    print(json.dumps({"port": int(endpoint.base_url.split(":")[2].split("/")[0]), "key": key}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    if sys.argv[1] == "engine":
        serve_engine(Path(sys.argv[2]))
    elif sys.argv[1] == "endpoint":
        asyncio.run(serve_endpoint())
    else:
        print(json.dumps(serve_queue(Path(sys.argv[2]))), flush=True)
        sys.stdin.read()
