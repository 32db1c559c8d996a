"""Calls to all engines at once: what happens when one answers late, badly, or never."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hpcrl.engine.membership import broadcast as module
from hpcrl.engine.membership.broadcast import EngineBroadcast, EngineLost
from hpcrl.engine.membership.http import Address, HttpError, request_json
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.run.engine_files import record_end
from hpcrl.run.rundir import RunDir

KEY = "k" * 64
Answer = Callable[[str, Any], tuple[int, Any]]


class Stub:
    """An engine on 127.0.0.1 that answers what it is told to; health: its status, or seconds that it takes to
    answer."""

    def __init__(self, answer: Answer, health: int | float = 200) -> None:
        self.answer = answer
        self.health = health
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if isinstance(stub.health, float):
                    time.sleep(stub.health)
                self._send(stub.health if isinstance(stub.health, int) else 200, None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                assert self.headers["Authorization"] == f"Bearer {KEY}"
                self._send(*stub.answer(self.path, body))

            def _send(self, status: int, body: Any) -> None:
                data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """Clients that gave up are what is tested."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.server.server_address[1], KEY)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def hang(*_: Any) -> tuple[int, Any]:
    time.sleep(20)
    return 200, None


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    made: list[Stub] = []
    yield made
    for stub in made:
        stub.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GLANCE", 0.05)
    monkeypatch.setattr(module, "LAST_WORDS", 0.3)


def fleet(rundir: RunDir, stubs: list[Stub], seconds: float = 5.0) -> EngineBroadcast:
    return EngineBroadcast(rundir, [Engine.at(stub.address, i) for i, stub in enumerate(stubs)], seconds)


def test_answers_come_in_the_engines_order(rundir: RunDir, stubs: list[Stub]) -> None:
    def slow(path: str, body: Any) -> tuple[int, Any]:
        time.sleep(0.1)
        return 200, [0, path, body]

    stubs += [
        Stub(slow),
        Stub(lambda path, body: (200, [1, path, body])),
        Stub(lambda *_: (200, None)),
        Stub(lambda *_: (200, b"text")),
    ]
    assert fleet(rundir, stubs).post("asking", "/x", {"a": 1}) == [[0, "/x", {"a": 1}], [1, "/x", {"a": 1}], None, None]


def test_a_call_of_all_workers(rundir: RunDir, stubs: list[Stub]) -> None:
    stubs += [Stub(lambda path, body: (200, {"results": [path, body]}))]
    assert fleet(rundir, stubs).call("asking", "method", "text") == [
        ["/collective_rpc", {"method": "method", "args": ["text"]}]
    ]


def test_late_engine_is_named(rundir: RunDir, stubs: list[Stub]) -> None:
    """A late engine is named although its health is good."""
    stubs += [Stub(lambda *_: (200, None)), Stub(hang)]
    with pytest.raises(DeadlineError, match="engine-1 on 127.0.0.1: pausing did not end.*0 s"):
        fleet(rundir, stubs, 0.3).post("pausing", "/pause")


def test_dead_core_is_noticed_while_waiting(rundir: RunDir, stubs: list[Stub]) -> None:
    """An engine whose core died is noticed while its answer is awaited."""
    stubs += [Stub(lambda *_: (200, None)), Stub(hang, health=503)]
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"engine-1 on 127.0.0.1 died during the update: .*answers 503"):
        fleet(rundir, stubs, 15).post("the update", "/update_weights")
    assert time.monotonic() - begin < 12


def test_the_dead_engines_own_words_come_first(
    rundir: RunDir, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_WORDS", 10.0)  # until they are there, however slow the machine is
    stubs += [Stub(hang, health=503)]
    threading.Timer(0.1, lambda: rundir.fail("engine", 0, "out of memory")).start()
    with pytest.raises(PeerError, match=r"engine-0: out of memory \(noticed during the update\)"):
        fleet(rundir, stubs, 15).post("the update", "/update_weights")


def test_another_roles_failure_ends_the_wait(rundir: RunDir, stubs: list[Stub]) -> None:
    stubs += [Stub(hang)]
    threading.Timer(0.1, lambda: rundir.fail("rollout", 0, "disk full")).start()
    with pytest.raises(PeerError, match="rollout-0: disk full"):
        fleet(rundir, stubs, 15).post("the update", "/update_weights")


def test_slow_health_is_not_death(rundir: RunDir, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> tuple[int, Any]:
        time.sleep(0.5)
        return 200, "done"

    monkeypatch.setattr(
        module,
        "request_json",
        lambda a, method, path, seconds, body=None: request_json(
            a, method, path, 0.1 if method == "GET" else seconds, body
        ),
    )
    stubs += [Stub(busy, health=1.0)]
    assert fleet(rundir, stubs).post("the update", "/update_weights") == ["done"]


def test_an_engine_that_is_gone(rundir: RunDir, stubs: list[Stub]) -> None:
    stubs += [Stub(lambda *_: (200, None)), Stub(lambda *_: (200, None))]
    made = fleet(rundir, stubs)
    stubs.pop().close()
    with pytest.raises(PeerError, match=r"engine-1 on 127.0.0.1 died during pausing: .*refused"):
        made.post("pausing", "/pause")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no such\ntensor", "code": 500}}, "no such tensor$"),
        ({"detail": "Method Not Allowed"}, "Method Not Allowed$"),
        (b"Internal Server Error", "Internal Server Error$"),
        ({"error": "x" * 5000}, r"x{600} \.\.\.$"),
    ],
)
def test_what_a_bad_answer_says(rundir: RunDir, stubs: list[Stub], body: Any, text: str) -> None:
    stubs += [Stub(lambda *_: (500, body))]
    with pytest.raises(
        PeerError, match=r"engine-0 on 127.0.0.1: the update failed: POST /update_weights at .* answered 500: " + text
    ):
        fleet(rundir, stubs).post("the update", "/update_weights")


def test_the_key_is_in_no_message(stubs: list[Stub]) -> None:
    stubs += [Stub(lambda *_: (401, {"error": "no"}))]
    with pytest.raises(HttpError) as caught:
        request_json(stubs[0].address, "POST", "/x", 5)
    assert KEY not in str(caught.value) + repr(stubs[0].address)
    assert caught.value.status == 401


# ---- whose end it is


def test_refusal_caused_by_another_engine(rundir: RunDir, stubs: list[Stub]) -> None:
    """Over gloo a receiver may wait for one that is dead, and says 500 although it is well itself."""

    def refuses(*_: Any) -> tuple[int, Any]:
        return 500, {"error": "Connection closed by peer"}

    stubs += [Stub(refuses), Stub(lambda *_: (200, None))]
    made = fleet(rundir, stubs)
    with pytest.raises(PeerError, match="engine-0 on 127.0.0.1: the update failed: .*Connection closed"):
        made.post("the update", "/update_weights")
    made.name_dead("the update", 0.3)  # all are well: it is what it says
    stubs[1].health = 503  # from here on: on a busy machine a look at it would come before the refusal
    with pytest.raises(EngineLost, match="engine-1 on 127.0.0.1 died during the update"):
        made.name_dead("the update", 10)


def test_what_an_engine_said_of_its_end_comes_with_it(
    rundir: RunDir, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_WORDS", 10.0)
    stubs += [Stub(hang, health=503)]
    threading.Timer(0.1, lambda: record_end(rundir, 0, "a", 0, 2, True, "out of memory")).start()
    with pytest.raises(EngineLost, match=r"out of memory \(noticed during the update\)"):
        fleet(rundir, stubs, 15).post("the update", "/update_weights")
