"""What strangers cost a server before they have proved a key: connections, descriptors, memory, and honest peers' time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import zmq

from hpcrl.queue import frames, unproven
from hpcrl.queue.auth import ClientKeys, ServerKeys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.rendezvous.store import KeyedStore
from tests.support.attacked import FILES, HERE, Attacked, start
from tests.support.queues import until
from tests.support.second_user import SecondUser
from tests.support.strangers import attack


def test_cut_and_joined() -> None:
    """A message is joined to the same bytes from frames of bounded size, and refused beyond the reader's bound."""
    for size in (0, 1, frames.PIECE, frames.PIECE + 1, 3 * frames.PIECE + 5):
        message = bytes(range(256)) * (size // 256) + bytes(size % 256)
        cut = frames.cut(message)
        assert frames.joined(cut, size) == message
        assert max(map(len, cut)) <= frames.PIECE
    with pytest.raises(ValueError, match="bytes, 100 are allowed"):
        frames.joined([b"x" * 60, b"x" * 60], 100)


def test_oldest_unproven_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many connections without a key the oldest are closed, and none with a key, however old and idle."""
    monkeypatch.setattr(unproven, "MOST", 8)
    monkeypatch.setattr(unproven, "YOUNG", 0.0)
    own, mine = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    server = StoreServer(HERE, ServerKeys(*own, (mine[0],)))
    member = KeyedStore(HERE, server.port, ClientKeys(*mine, own[0]), timedelta(seconds=20))
    member.set("x", "1")
    ended = member._connection().get_monitor_socket(zmq.EVENT_DISCONNECTED)
    idle = []
    for _ in range(40):
        idle.append(socket.create_connection((HERE, server.port)))
        time.sleep(0.005)
    for one in idle:
        one.setblocking(False)

    until(lambda: sum(map(_closed, idle)) >= 32)
    assert not any(map(_closed, idle[-8:]))
    assert member.get("x") == b"1" and not ended.poll(0)
    server.close()


def test_crowd_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of ranks that start at once are not closed for being many: only what is older, or beyond a crowd."""
    monkeypatch.setattr(unproven, "MOST", 2)
    monkeypatch.setattr(unproven, "CROWD", 20)
    monkeypatch.setattr(unproven, "YOUNG", 3600.0)
    own = [key.decode() for key in zmq.curve_keypair()]
    server = StoreServer(HERE, ServerKeys(*own, ()))
    idle = [socket.create_connection((HERE, server.port)) for _ in range(30)]
    for one in idle:
        one.setblocking(False)
    until(lambda: sum(map(_closed, idle)) == 10)
    assert all(map(_closed, idle[:10]))
    server.close()


def _closed(connection: socket.socket) -> bool:
    """Whether the server has ended the connection; it may have greeted."""
    try:
        while found := connection.recv(1000):
            assert found
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# ---- as a second account, against processes


@pytest.fixture(scope="module", params=["store", "queue"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Attacked]]:
    """A server to attack, and one like it that is left alone."""
    folder = tmp_path_factory.mktemp(request.param)
    both = [start(request.param, folder / name) for name in ("attacked", "other")]
    yield both
    for one in both:
        one.close()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["idle", f"frames={frames.LIMIT}", "frames=8000000"])
def test_a_thousand_connections_cost_little(pair: list[Attacked], second_user: SecondUser, kind: str) -> None:
    """A thousand strangers' connections, each as heavy as it can be, cost at most 64 MB, and honest calls are answered
    meanwhile."""
    cost = attack(second_user, kind, *pair)
    assert cost.grown <= 64e6
    assert cost.made >= 64
    pair[0].again()


@pytest.mark.process
def test_descriptors_remain(pair: list[Attacked], second_user: SecondUser) -> None:
    """More connections than the process may have descriptors leave it enough of them, and it lets honest peers in."""
    cost = attack(second_user, "idle", *pair, count=FILES + 500, seconds=6.0)
    assert cost.files < 0.8 * FILES
    pair[0].again()
    assert pair[0].process.poll() is None
