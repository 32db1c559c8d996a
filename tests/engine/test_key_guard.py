"""The guard of an engine's routes, without vLLM: who gets through, what the others see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hpcrl.engine.key_guard import KEY_FILE, RunKeyGuard
from hpcrl.errors import UsageError
from hpcrl.transport.auth import key_of_engine

OF_THE_RUN = "0123456789abcdef" * 4
KEY = key_of_engine(OF_THE_RUN.encode(), "0.0")


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "http.key"
    path.write_text(OF_THE_RUN + "\n")
    monkeypatch.setenv(KEY_FILE, str(path))
    return path


def ask(
    kind: str = "http", headers: list[tuple[bytes, bytes]] | None = None, path: str = "/health"
) -> tuple[bool, list[dict[str, Any]]]:
    """(the app behind the guard was reached, what the client was sent)"""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    asyncio.run(
        RunKeyGuard(app)({"type": kind, "path": path, "method": "GET", "headers": headers or []}, receive, send)
    )
    return bool(reached), sent


def bearer(key: str, name: bytes = b"authorization", scheme: str = "Bearer ") -> list[tuple[bytes, bytes]]:
    return [(name, (scheme + key).encode())]


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize("name", [b"authorization", b"Authorization"])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_right_key_passes(kind: str, name: bytes) -> None:
    assert ask(kind, bearer(KEY, name)) == (True, [])


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "0"),
        bearer(KEY[:-1] + "x"),
        bearer(KEY, scheme=""),
        bearer(KEY, scheme="bearer "),
        bearer(KEY, scheme="Basic "),
        bearer(KEY, name=b"x-api-key"),
        bearer(KEY) + bearer("other"),
        [(b"authorization", b"\xff\xfe")],
    ],
)
def test_anything_else_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    reached, sent = ask(headers=headers)
    assert not reached
    assert sent[0]["status"] == 401
    assert (b"content-type", b"application/json") in sent[0]["headers"]
    assert (b"www-authenticate", b'Bearer realm="0.0"') in sent[0]["headers"]
    assert KEY.encode() not in sent[1]["body"]


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/pause", "/collective_rpc", "/v1/models", "/", "//health", "/no/such/route"]
)
def test_every_path_is_guarded(path: str) -> None:
    assert ask(path=path)[0] is False


@pytest.mark.usefixtures("key_file")
def test_websocket_without_key_is_closed() -> None:
    """A WebSocket without the key is closed before it is accepted."""
    assert ask("websocket")[1] == [
        {"type": "websocket.close", "code": 1008, "reason": "the key of the run is missing or wrong"}
    ]


@pytest.mark.usefixtures("key_file")
def test_unknown_traffic_is_dropped() -> None:
    """An unknown kind of traffic is dropped."""
    assert ask("webtransport") == (False, [])


@pytest.mark.usefixtures("key_file")
def test_start_and_stop_of_the_server_pass() -> None:
    assert ask("lifespan")[0] is True


def test_no_key_no_server(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file.write_text("short")
    with pytest.raises(UsageError, match="shorter"):
        RunKeyGuard(None)  # type: ignore[arg-type]
    key_file.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        RunKeyGuard(None)  # type: ignore[arg-type]
    monkeypatch.delenv(KEY_FILE)
    with pytest.raises(UsageError, match=KEY_FILE):
        RunKeyGuard(None)  # type: ignore[arg-type]
