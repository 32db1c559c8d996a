"""A store among holders of the run's keys, and what a stranger on the same machine makes of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from hpcrl.errors import PeerError, UsageError
from hpcrl.queue.auth import ClientKeys, ServerKeys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.rendezvous.store import KeyedStore
from hpcrl.rendezvous.table import MAX_ASK, StoreRequest, to_bytes

HERE = "127.0.0.1"
ADDRESSES = "default_pg/0//cpu//0/1"  #: where gloo's rank 1 tells where it listens


class Meeting:
    """A server and its members' keys."""

    def __init__(self) -> None:
        own, mine = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
        self.server = StoreServer(HERE, ServerKeys(*own, (mine[0],)))
        self.keys = ClientKeys(*mine, own[0])

    def member(self, seconds: float = 10, **more: Any) -> KeyedStore:
        return KeyedStore(HERE, self.server.port, self.keys, timedelta(seconds=seconds), **more)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    found = Meeting()
    yield found
    found.server.close()


def test_members_share_what_they_put_there(meeting: Meeting) -> None:
    members = meeting.member(), meeting.member()
    one, other = (dist.PrefixStore("a", member) for member in members)
    one.set("x", b"\0\xff")
    assert other.get("x") == b"\0\xff"
    assert other.check(["x"]) and not other.check(["y"])
    assert one.add("n", 2) == 2 and other.add("n", 3) == 5
    assert one.compare_set("c", "", "won") == b"won" and other.compare_set("c", "", "lost") == b"won"
    one.multi_set(["p", "q"], ["1", "2"])
    assert other.multi_get(["p", "q"]) == [b"1", b"2"]
    one.append("p", "0")
    assert other.get("p") == b"10"
    assert one.delete_key("x") and not other.check(["x"])
    assert other.num_keys() == 4
    assert meeting.member().clone().get("a/q") == b"2"


def test_values_of_many_frames(meeting: Meeting) -> None:
    """A value of megabytes goes in frames as small as a server takes from strangers; a larger one is refused here."""
    value = bytes(range(256)) * 2**13
    meeting.member().set("large", value)
    assert meeting.member().get("large") == value
    assert meeting.server._socket.maxmsgsize < 2**14
    with pytest.raises(dist.DistStoreError, match="a store takes"):
        meeting.member().set("larger", bytes(MAX_ASK))


def test_a_key_is_waited_for_and_only_so_long(meeting: Meeting) -> None:
    store = meeting.member()
    threading.Timer(0.1, lambda: meeting.member().set("late", "now")).start()
    assert store.get("late") == b"now"
    begun = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="answer wait never within 0 s"):
        store.wait(["never"], timedelta(seconds=0.2))
    assert time.monotonic() - begun < 5
    meeting.member().set("never", "")  # its late answer is not taken for another's
    assert store.add("n", 1) == 1


def test_a_wait_ends_when_the_run_has_failed(meeting: Meeting) -> None:
    def failed() -> None:
        raise PeerError("engine-0 died")

    with pytest.raises(PeerError, match="engine-0 died"):
        meeting.member(60, check=failed).get("never")


def test_groups_of_torch_meet_in_it(meeting: Meeting) -> None:
    def reduce(rank: int) -> float:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HERE)]
        options._timeout = timedelta(seconds=20)
        member = meeting.member()
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", member), rank, 3, options)
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        return tensor.item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reduce, range(3))) == [3.0] * 3


def _plain(socket: zmq.Socket, meeting: Meeting) -> None:
    socket.plain_username = b"admin"
    socket.plain_password = b"admin"


def _unlisted(socket: zmq.Socket, meeting: Meeting) -> None:
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = meeting.keys.server.encode()  # it is public, after all


def _stolen_name(socket: zmq.Socket, meeting: Meeting) -> None:
    _unlisted(socket, meeting)
    socket.curve_publickey = meeting.keys.public.encode()  # of a member, without its secret


@pytest.mark.parametrize(
    "disguise", [lambda *_: None, _plain, _unlisted, _stolen_name], ids=["null", "plain", "own-key", "name"]
)
def test_a_stranger_plants_no_address(meeting: Meeting, disguise: Any) -> None:
    meeting.member().set(ADDRESSES, "of the rank")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        disguise(stranger, meeting)
        stranger.connect(f"tcp://{HERE}:{meeting.server.port}")
        for ask in (
            StoreRequest(1, "set", [ADDRESSES], [b"mine"]),
            StoreRequest(2, "delete", [ADDRESSES]),
            StoreRequest(3, "get", [ADDRESSES]),
        ):
            with contextlib.suppress(zmq.Again):  # the server has refused it already
                stranger.send(to_bytes(ask), zmq.DONTWAIT)
        assert not stranger.poll(300)
    assert meeting.member().get(ADDRESSES) == b"of the rank"
    assert meeting.member().num_keys() == 1


def test_torchs_own_client_is_not_let_in(meeting: Meeting) -> None:
    def plant() -> None:
        store = dist.TCPStore(
            HERE, meeting.server.port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        store.set(ADDRESSES, "mine")

    with pytest.raises(dist.DistError):
        plant()
    assert not meeting.server.table.values


def test_what_a_member_says_does_not_end_the_server(meeting: Meeting) -> None:
    member = meeting.member()
    member.set("x", "1")
    for frame in (
        b"",
        b"\xc1",
        b"x" * 1000,
        to_bytes([1, "exec", ["x"]]),
        to_bytes(StoreRequest(1, "add", ["x", "y"])),
        to_bytes(StoreRequest(1, "swap")),
    ):
        member._connection().send(frame)
    member._connection().send_multipart([b"two", b"frames"])
    member.set("word", "no number")
    member._connection().send(to_bytes(StoreRequest(1, "add", ["word"])))
    assert member.get("x") == b"1"


def test_it_listens_on_one_address_or_says_why_not() -> None:
    own = [key.decode() for key in zmq.curve_keypair()]
    with pytest.raises(UsageError, match="means every interface"):
        StoreServer("0.0.0.0", ServerKeys(*own, ()))
    with pytest.raises(UsageError, match="cannot listen on 192.0.2.1: "):
        StoreServer("192.0.2.1", ServerKeys(*own, ()))


def test_store_in_a_reference_cycle(meeting: Meeting) -> None:
    """Collection clears what knows a context's connections before it ends the context: one that is a store's own would
    wait for them."""

    class Holder:
        def __init__(self) -> None:
            self.store = meeting.member()
            self.itself = self

    gone = []
    for _ in range(3):
        Holder().store.set("x", "1")
        collect = threading.Thread(target=gc.collect, daemon=True)
        collect.start()
        collect.join(20)
        gone.append(not collect.is_alive())
    assert all(gone)


def test_a_server_that_has_ended_is_not_waited_for(meeting: Meeting) -> None:
    store = meeting.member(seconds=300, look=200.0)  # as among thousands of ranks, who seldom look at files
    store.set("x", "1")
    threading.Timer(0.1, meeting.server.close).start()
    with pytest.raises(dist.DistStoreError, match="ended before it answered"):
        store.wait(["never"])
