"""The rollout queue over real sockets: who gets what, once, and who gets nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.utils.z85

from hpcrl.errors import DataError, DeadlineError, HpcrlError, PeerError, UsageError
from hpcrl.plan import Location, Plan
from hpcrl.run.peers import RolloutPeer, find, publish
from hpcrl.run.rundir import RunDir
from hpcrl.transport import auth, messages, sockets
from hpcrl.transport.client import Late, QueueClient, Unanswered
from hpcrl.transport.messages import Answer, Call, Failed, Fetch, Pending, Welcome
from hpcrl.transport.share_format import WireError, encode
from tests.support.children import read_line
from tests.support.cpu_seconds import slowdown
from tests.support.queues import HERE, PLAN, WAIT, Line, Served, hear, hear_all, hello, make_rundir, raw, tell, until
from tests.support.shares import same, share

REPO = Path(__file__).parents[2]
LONG = (400, 300, 500)  # answers of a share whose columns `small_pieces` cuts


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return make_rundir(tmp_path / "run")


@pytest.fixture
def ran() -> list[str]:
    """The calls whose handler ran."""
    return []


@pytest.fixture
def served(rundir: RunDir, ran: list[str]) -> Iterator[Served]:
    gate = asyncio.Event()

    async def echo(params: dict[str, Any]) -> dict[str, Any]:
        ran.append("echo")
        return {"got": params}

    async def slow(params: dict[str, Any]) -> dict[str, Any]:
        ran.append("slow")
        await gate.wait()
        return {"slow": True}

    async def release(params: dict[str, Any]) -> dict[str, Any]:
        gate.set()
        return {}

    async def bad_data(params: dict[str, Any]) -> dict[str, Any]:
        raise DataError("prompts.jsonl, line 3: no label", "add one")

    async def late(params: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        raise DataError("too late to matter")

    async def broken(params: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("nobody")

    async def unsendable(params: dict[str, Any]) -> dict[str, Any]:
        return {"it": object()}

    handlers = {f.__name__: f for f in (echo, slow, release, bad_data, late, broken, unsendable)}
    its = Served(rundir, handlers)
    yield its
    its.close()


@pytest.fixture
def client(served: Served) -> Iterator[QueueClient]:
    its = served.client()
    yield its
    its.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer; both sides have the same."""
    monkeypatch.setattr(messages, "PIECE_BYTES", 500)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unanswered is asked again soon."""
    monkeypatch.setattr("hpcrl.transport.client.REPEAT", 0.1)


# ---- shares


def test_fetch_before_and_after_put(served: Served, client: QueueClient) -> None:
    """A share is fetched whether it is put before or after."""
    served.put(0, share(0), share(0, seed=1))
    assert same(client.fetch(0), share(0))
    threading.Timer(0.1, lambda: served.put(1, share(1), share(1, seed=1))).start()
    assert same(client.fetch(1), share(1))


def test_each_rank_gets_its_own(served: Served, client: QueueClient) -> None:
    other = served.client(1)
    served.put(0, share(0), share(0, seed=1))
    got = other.fetch(0)
    assert same(client.fetch(0), share(0))
    other.close()
    assert same(got, share(0, seed=1))  # it outlives the client


def test_a_share_of_many_pieces_is_put_together(served: Served, client: QueueClient, small_pieces: None) -> None:
    """Once it is checked the server is told, and lets it go."""
    its = share(0, answers=LONG)
    served.put(0, its, share(0, seed=1))
    assert served.look(lambda server: len(server._ranks[0].shares[0].frames)) > len(encode(its)) + 5
    assert same(client.fetch(0), its)
    until(lambda: not served.server._ranks[0].shares)


def test_one_share_comes_ahead_of_its_fetch(served: Served, client: QueueClient) -> None:
    for rollout_id in range(3):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))
    assert same(client.fetch(0), share(0))
    until(lambda: list(served.server._ranks[0].shares) == [1, 2])
    assert served.look(lambda server: [bool(its.route) for its in server._ranks[0].shares.values()]) == [True, False]
    hold = threading.Event()
    served.block(hold)
    assert same(client.fetch(1), share(1))  # while the server does nothing
    hold.set()
    assert same(client.fetch(2), share(2))


def test_the_next_share_comes_during_decoding(
    served: Served, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not wait until the one before is checked."""
    for rollout_id in range(2):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))

    def look(_: Any) -> None:
        until(lambda: served.look(lambda server: bool(server._ranks[0].shares[1].route)))
        raise WireError("seen")

    monkeypatch.setattr("hpcrl.transport.client.decode", look)
    with pytest.raises(WireError, match="seen"):
        client.fetch(0)
    assert served.look(lambda server: list(server._ranks[0].shares)) == [0, 1]


def test_a_share_is_the_same_however_late(served: Served, client: QueueClient) -> None:
    """One that comes after its fetch was given up is kept, and so is the next."""
    with pytest.raises(Late):
        client.fetch(0, 0.05)
    for rollout_id in range(2):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))
    for _ in range(3):
        client.call("echo")
    assert [same(client.fetch(rollout_id), share(rollout_id)) for rollout_id in range(2)] == [True, True]


def test_what_is_on_its_way_is_not_sent_again(
    served: Served, client: QueueClient, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    """However often a share is asked for over one connection."""
    came: list[messages.Request] = []
    read = messages.read_from_server

    def spy(frame: Any) -> Any:
        message = read(frame)
        came.extend([message.to] if isinstance(message, Answer) else [])
        return message

    monkeypatch.setattr(messages, "read_from_server", spy)
    threading.Timer(0.5, lambda: served.put(0, share(0), share(0, seed=1))).start()
    assert same(client.fetch(0), share(0))
    served.put(1, share(1), share(1, seed=1))
    assert client.call("echo") and same(client.fetch(1), share(1))
    with pytest.raises(Late):
        client.fetch(2, 0.5)
    assert sorted(came) == [("call", 0), ("share", 0), ("share", 1)]


def test_a_share_that_comes_twice_counts_once(served: Served, client: QueueClient, soon: None) -> None:
    async def forget(server: Any) -> None:
        for its in server._ranks[0].shares.values():
            its.route = b""

    for rollout_id in range(3):
        served.put(rollout_id, share(rollout_id, answers=LONG), share(rollout_id, seed=1))
    for rollout_id in range(3):
        assert same(client.fetch(rollout_id), share(rollout_id, answers=LONG))
        served.run(forget(served.server))
        client.call("echo")


def test_a_share_is_delivered_once(served: Served, client: QueueClient) -> None:
    served.put(0, share(0), share(0, seed=1))
    client.fetch(0)
    with pytest.raises(PeerError, match="share of rollout 0.*delivered to trainer DP.*0 before"):
        client.fetch(0)


def test_ids_go_up(served: Served) -> None:
    served.put(1, share(1), share(1, seed=1))
    for rollout_id in range(2):
        with pytest.raises(ValueError, match=f"rollout {rollout_id} was put after.*1"):
            served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))


def test_a_run_may_begin_anywhere(served: Served, client: QueueClient) -> None:
    """A resumed one does; what is not asked for is let go."""
    for rollout_id in (5, 6, 7):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))
    assert [same(client.fetch(rollout_id), share(rollout_id)) for rollout_id in (5, 7)] == [True, True]
    until(lambda: not served.server._ranks[0].shares)


def test_misfit_share_is_refused_by_its_maker(served: Served) -> None:
    """Shares of another rollout, or too few, are refused where they are made."""
    with pytest.raises(ValueError, match="rollout for each of 2 ranks"):
        served.put(0, share(0))
    with pytest.raises(ValueError, match="share of that rollout"):
        served.put(0, share(0), share(1))


# ---- stopping and failing


def test_call_during_a_stop(served: Served, rundir: RunDir, soon: None) -> None:
    """A call of a run that is to stop outlasts a slow server but not a silent one."""
    client = served.client(patience=1.5)
    rundir.request_stop()
    with pytest.raises(Late) as error:
        client.call("slow", 3)
    assert type(error.value) is Late and client.stop_seen is not None
    hold = threading.Event()
    served.block(hold)
    begun = time.monotonic()
    try:
        for _ in range(2):  # a server that is given up is not waited for again
            with pytest.raises(Unanswered, match="asked to stop"):
                client.call("echo", WAIT)
    finally:
        hold.set()
    assert time.monotonic() - begun < WAIT
    client.close()


def test_silent_server_without_a_stop(served: Served) -> None:
    """A silent server is waited for in a run that continues."""
    client = served.client(patience=0.0)
    with pytest.raises(Late) as error:
        client.call("slow", 2)
    assert not isinstance(error.value, Unanswered) and client.stop_seen is None
    client.close()


@pytest.mark.parametrize("wait", [lambda c: c.fetch(0), lambda c: c.call("slow")])
def test_failure_answers_all_that_wait_and_that_come(served: Served, client: QueueClient, wait: Any) -> None:
    threading.Timer(0.1, lambda: served.run(served.server.fail("engine-1 is dead"))).start()
    for again in (wait, lambda c: c.fetch(0), lambda c: c.call("echo")):
        with pytest.raises(PeerError, match="^engine-1 is dead$"):
            again(client)
    with pytest.raises(PeerError, match="engine-1 is dead"):
        served.put(0, share(0), share(0, seed=1))


def test_an_answer_stays_what_it_was(rundir: RunDir) -> None:
    """A call that was answered with a failure has no other answer once its handler is done."""
    gate = asyncio.Event()

    async def wait(params: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return {}

    async def open_gate() -> None:
        gate.set()
        await asyncio.sleep(0.05)

    served, call, answers = Served(rundir, {"wait": wait}), Call("a", 0, "wait", {}), []
    with raw(served) as dealer:
        tell(dealer, call, call)
        assert hear(dealer) == Pending()
        served.run(served.server.fail("engine-1 is dead"))
        answers.append(hear(dealer))
        served.run(open_gate())
        assert hear(dealer, 0.05) is None
    with raw(served) as dealer:
        tell(dealer, call)
        answers.append(hear(dealer))
    assert answers == [Failed("engine-1 is dead", kind="PeerError", to=("call", 0))] * 2
    served.close()


@pytest.mark.parametrize("wait", [lambda c: c.fetch(0), lambda c: c.call("slow")])
def test_another_roles_error_ends_a_wait_at_once(served: Served, client: QueueClient, wait: Any) -> None:
    failed: list[float] = []

    def fail() -> None:
        failed.append(time.monotonic())
        served.rundir.fail("trainer", 1, "out of memory")

    threading.Timer(0.1, fail).start()
    with pytest.raises(PeerError, match="^trainer-1: out of memory$"):
        wait(client)
    assert time.monotonic() - failed[0] < 5  # 0.2 s, and room for a busy machine


# ---- deadlines


def test_deadlines_name_role_host_and_what_was_awaited(served: Served, client: QueueClient) -> None:
    peer = find(served.rundir, RolloutPeer)
    host = r"trainer DP rank 0 on \S+"
    where = rf"rollout-0 on 127\.0\.0\.1:{peer.port}"
    with pytest.raises(DeadlineError, match=rf"{where} did not deliver.*7 to {host} within 0.1 s.*rollout-0\.log"):
        client.fetch(7, 0.1)
    with pytest.raises(
        DeadlineError, match=rf"{where} did not answer 'slow'.*{host} within 0.1 s \(last heard of it \d s ago\)"
    ):
        client.call("slow", 0.1)


def test_fetch_resumes_after_deadline(served: Served, client: QueueClient) -> None:
    """A fetch resumes where one stopped at its deadline."""
    with pytest.raises(DeadlineError):
        client.fetch(0, 0.05)
    served.put(0, share(0, answers=LONG), share(0, seed=1))
    assert same(client.fetch(0), share(0, answers=LONG))


def test_late_answer_is_not_mistaken(served: Served, client: QueueClient) -> None:
    """An answer that comes too late is not taken for another."""
    for method in ("slow", "late"):
        with pytest.raises(DeadlineError):
            client.call(method, 0.05)
    client.call("release")
    time.sleep(0.05)
    assert client.call("echo", a=1) == {"got": {"a": 1}}


def test_a_server_that_never_comes_up_is_named(rundir: RunDir) -> None:
    with pytest.raises(DeadlineError, match="rollout-0 did not come up"):
        QueueClient(rundir, PLAN, 0, 2, 0.1)


def test_a_server_that_is_gone_is_named(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LINGER", 100)
    served = Served(rundir)
    client = served.client()
    served.close()
    with pytest.raises(DeadlineError, match="not deliver the samples.*0"):
        client.fetch(0, 0.3)
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < 10
    with pytest.raises(DeadlineError, match="welcome trainer DP rank 0"):
        QueueClient(rundir, PLAN, 0, 2, 0.3)


# ---- calls


def test_a_call_carries_parameters_and_result(client: QueueClient) -> None:
    state = {"epoch": 1, "order": list(range(1000)), "rng": b"\x00\xff", "none": None, "deep": {"a": [1.5, "x"]}}
    assert client.call("echo", rollout_id=3, state=state) == {"got": {"rollout_id": 3, "state": state}}


def test_errors_of_a_handler_reach_the_caller(
    served: Served, client: QueueClient, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="^prompts.jsonl, line 3: no label; add one$"):
        client.call("bad_data")
    with pytest.raises(PeerError, match="rollout process: KeyError: 'nobody'"):
        client.call("broken")
    assert "in broken" in capfd.readouterr().err
    with pytest.raises(WireError, match="cannot be sent"):
        client.call("unsendable")
    with pytest.raises(PeerError, match="no method 'ecko', only .*echo"):
        client.call("ecko")
    with pytest.raises(WireError, match="parameters of echo: cannot"):
        client.call("echo", it=object())
    assert client.call("echo") == {"got": {}}


def test_a_long_call_holds_up_nobody(served: Served, client: QueueClient) -> None:
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(client.call("slow")))
    thread.start()
    other = served.client(1)
    served.put(0, share(0), share(0, seed=1))
    assert same(other.fetch(0), share(0, seed=1))
    assert not answer
    other.call("release")
    thread.join(WAIT)
    assert answer == [{"slow": True}]
    other.close()


# ---- broken lines


@pytest.fixture
def line(served: Served, soon: None) -> Iterator[Line]:
    its = Line(served)
    yield its
    its.close()


def test_a_fetch_survives_a_broken_line(served: Served, line: Line) -> None:
    client = served.client()
    served.put(0, share(0, answers=LONG), share(0, seed=1))
    line.limit = 5000  # in the middle of the share
    assert same(client.fetch(0), share(0, answers=LONG))
    line.cut()  # while nobody waits
    threading.Timer(0.2, lambda: served.put(1, share(1, answers=LONG), share(1, seed=1))).start()
    assert same(client.fetch(1), share(1, answers=LONG))
    assert line.connections >= 3
    client.close()


def test_a_call_over_a_broken_line_runs_once(served: Served, line: Line, ran: list[str]) -> None:
    client, other = served.client(), served.client(1)

    def disturb() -> None:
        for _ in range(2):
            until(lambda: "slow" in ran)
            line.cut()
            time.sleep(0.3)  # the client has come back and asked again
        other.call("release")

    thread = threading.Thread(target=disturb)
    thread.start()
    assert client.call("slow") == {"slow": True}
    thread.join(WAIT)
    assert ran == ["slow"]
    assert line.connections > 2
    client.close()
    other.close()


def both(rollout_id: int) -> list[Any]:
    """The shares of both ranks."""
    return [share(rollout_id, answers=LONG), share(rollout_id, seed=1)]


@pytest.mark.parametrize("seed", range(3))
def test_all_arrives_once_over_a_bad_line(
    served: Served, line: Line, ran: list[str], seed: int, small_pieces: None
) -> None:
    """Cut now and then, also within a share: no share comes twice or is lost, no call runs twice."""
    rng = random.Random(seed)
    client = served.client()
    for rollout_id in range(6):
        threading.Timer(0.05, lambda number=rollout_id: served.put(number, *both(number))).start()
        line.limit = rng.randrange(12_000)
        assert same(client.fetch(rollout_id), both(rollout_id)[0])
        assert client.call("echo", n=rollout_id) == {"got": {"n": rollout_id}}
    assert len(ran) == 6 and line.connections >= 3
    with pytest.raises(PeerError, match="delivered"):
        client.fetch(5)
    client.close()


# ---- the protocol, by a peer that says what it wants


def test_a_repeated_fetch_has_the_same_answer(served: Served, small_pieces: None) -> None:
    """Over another connection; over the same one it is on its way."""
    served.put(0, share(0, answers=LONG), share(0, seed=1))
    found = []
    for _ in range(2):
        with raw(served) as dealer:
            tell(dealer, hello(served), Fetch(0, 1), Fetch(0, 1))
            assert isinstance(hear(dealer), Welcome)
            found.append(hear_all(dealer))
            assert hear(dealer) == Pending()
    assert found[0] == found[1] and found[0][0].to == ("share", 0)
    assert found[0][1] == [bytes(frame) for frame in encode(share(0, answers=LONG))]


def test_only_what_is_wanted_is_sent(served: Served) -> None:
    for rollout_id in range(3):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))
    with raw(served) as dealer:
        tell(dealer, Fetch(1, 1))
        assert hear(dealer).to == ("share", 1)
        assert hear(dealer, 0.05) is None
        tell(dealer, Fetch(2, 2**62))
        assert hear(dealer).to == ("share", 2)
        tell(dealer, Fetch(1, 2))
        assert "rollout 1 was delivered" in hear(dealer).what
        tell(dealer, Fetch(2, 3))
        assert hear(dealer) == Pending()
    assert served.look(lambda server: list(server._ranks[0].shares)) == [2]


def test_a_call_that_comes_twice_runs_once(served: Served, ran: list[str]) -> None:
    """Whatever it then asks, and over whichever connection; another client's is another."""
    call, answer = Call("a", 1, "echo", {"n": 1}), (Answer(("call", 1), [9]), [messages.pack({"got": {"n": 1}})])
    with raw(served) as dealer:
        tell(dealer, call)
        assert hear_all(dealer) == answer
        tell(dealer, call, Call("a", 1, "echo", {}))
        assert [hear(dealer) for _ in range(2)] == [Pending()] * 2
    with raw(served) as dealer:
        tell(dealer, call, Call("b", 1, "echo", {"n": 1}))
        assert [hear_all(dealer) for _ in range(2)] == [answer] * 2
        assert ran == ["echo"] * 2
        tell(dealer, Call("a", 2, "echo", {}), call, hello(served))
        assert {type(hear(dealer)) for _ in range(2)} == {Answer, Welcome}  # the one before is given up
    assert ran == ["echo"] * 3


def test_a_call_at_work_is_told_so(served: Served, ran: list[str]) -> None:
    slow = Call("a", 0, "slow", {})
    with raw(served) as dealer, raw(served) as other:
        tell(dealer, slow, slow)
        assert hear(dealer) == Pending()
        tell(other, slow, Call("b", 0, "release", {}))
        assert [hear_all(other)[1] for _ in range(3)] == [[], [messages.pack({})], [messages.pack({"slow": True})]]
        assert hear(dealer, 0.05) is None  # the answer goes where it was asked last
        tell(dealer, slow)
        assert hear_all(dealer)[1] == [messages.pack({"slow": True})]
    assert ran == ["slow"]


GARBAGE = [
    [b""],
    [b"\x00" * 100],
    [b"\x80"],
    [b"a", b"b"],
    [messages.pack(Pending())],
    [messages.pack(Fetch(0, 0)), b"more"],
    [messages.pack(Call("x" * 256, 0, "echo", {}))],
    [b"\xc1" * 5],
]


def test_garbage_is_logged_and_answered(served: Served, client: QueueClient, capfd: pytest.CaptureFixture[str]) -> None:
    """Garbage is logged and answered, and ends nothing."""
    with raw(served, 1) as dealer:
        tell(dealer, hello(served, 1))
        assert isinstance(hear(dealer), Welcome)
        for frames in GARBAGE:
            dealer.send_multipart(frames)
            answer = hear(dealer)
            assert isinstance(answer, Failed)
            assert answer.kind == "WireError"
        tell(dealer, Fetch(2**62, 2**62), hello(served, 1))
        assert [type(hear(dealer)) for _ in range(2)] == [Pending, Welcome]
    logged = capfd.readouterr().err
    assert logged.count("queue: trainer DP rank 1: not a message of the queue") == len(GARBAGE)
    assert client.call("echo") == {"got": {}}


def test_a_defect_in_one_answer_ends_nothing(
    served: Served, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(served.server, "_deliver", defect)
        with pytest.raises(PeerError, match="could not answer: see"):
            client.fetch(0)
    assert client.call("echo") == {"got": {}}


def test_who_is_gone_holds_up_nobody(served: Served) -> None:
    with raw(served) as dealer:
        tell(dealer, Fetch(0, 1))
        assert hear(dealer) == Pending()
    time.sleep(0.1)
    served.put(0, share(0), share(0, seed=1))
    client = served.client()
    assert same(client.fetch(0), share(0))
    client.close()


def test_too_large_a_message_ends_only_its_connection(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LIMIT", 100_000)
    served = Served(rundir)
    with raw(served) as dealer:
        tell(dealer, Fetch(0, 0))
        assert hear(dealer) == Pending()
        route = served.server._ranks[0].route
        dealer.send(b"x" * 200_000)
        answer = None
        while answer is None:  # what was written after it over the same connection is lost
            tell(dealer, Fetch(0, 0))
            answer = hear(dealer, 0.2)
        assert answer == Pending() and served.server._ranks[0].route != route
    served.close()


# ---- who may come in


def lock(public: bytes, secret: bytes, server: str) -> Any:
    def setup(dealer: zmq.Socket) -> None:
        dealer.curve_publickey = public
        dealer.curve_secretkey = secret
        dealer.curve_serverkey = server.encode()

    return setup


def plain(dealer: zmq.Socket) -> None:
    dealer.plain_username = b"dp-0"
    dealer.plain_password = b"secret"


@pytest.mark.parametrize("who", ["unknown key", "another server", "no key", "password"])
def test_who_holds_no_key_of_the_attempt_gets_nothing(served: Served, who: str) -> None:
    server = auth.client_keys(served.rundir, 0).server
    setup = {
        "unknown key": lock(*zmq.curve_keypair(), server),
        "another server": lambda d: (
            auth.lock_client(d, auth.client_keys(served.rundir, 0)),
            setattr(d, "curve_serverkey", zmq.curve_keypair()[0]),
        ),
        "no key": None,
        "password": plain,
    }[who]
    with raw(served, None, setup) as dealer:
        tell(dealer, hello(served), Fetch(0, 0))
        served.put(0, share(0), share(0, seed=1))
        assert hear(dealer, 0.3) is None
    assert not served.server._ranks[0].route
    client = served.client()
    assert same(client.fetch(0), share(0))
    client.close()


REQUEST = [b"1.0", b"7", auth.ZAP_DOMAIN, b"192.0.2.7", b"", b"CURVE"]


def ask_at_the_door(served: Served, request: list[bytes]) -> list[bytes]:
    """What the server answers to libzmq's question, put to it where libzmq puts it."""
    context = zmq.Context.shadow(served.server._context)
    with context.socket(zmq.REQ) as door:
        door.linger = 0
        door.connect("inproc://zeromq.zap.01")
        door.send_multipart(request)
        assert door.poll(WAIT * 1000), "no answer"
        return door.recv_multipart()


@pytest.mark.parametrize(
    ("at", "other"),
    [
        (None, None),
        (0, b"2.0"),
        (2, b"global"),
        (2, b""),
        (5, b"NULL"),
        (5, b"PLAIN"),
        (5, b"GSSAPI"),
        (6, b"x" * 32),
        (6, b"short"),
        (6, b""),
    ],
)
def test_the_door_opens_to_a_known_curve_key_alone(
    served: Served, at: int | None, other: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    good = [*REQUEST, zmq.utils.z85.decode(auth.client_keys(served.rundir, 1).public)]
    request = list(good)
    if at is not None:
        request[at] = other
    answer = ask_at_the_door(served, request)
    assert answer[:3] == [b"1.0", b"7", b"200" if at is None else b"400"]
    assert answer[4] == (b"dp-1" if at is None else b"")
    assert ("refused a peer at 192.0.2.7: it holds no key" in capfd.readouterr().err) == (other == b"x" * 32)
    assert ask_at_the_door(served, good)[4] == b"dp-1", "it goes on answering"


@pytest.mark.parametrize("question", [[b""], [b"1.0"], [b"1.0", b"7"], REQUEST, [*REQUEST, b"x" * 32, b"more"]])
def test_the_door_survives_a_question_that_is_none(served: Served, question: list[bytes]) -> None:
    assert ask_at_the_door(served, question)[2] == b"400"
    assert rank_1_comes_in(served)


def rank_1_comes_in(served: Served) -> bool:
    with raw(served, 1) as dealer:
        tell(dealer, hello(served, 1))
        return isinstance(hear(dealer), Welcome)


def test_without_a_doorkeeper_nobody_comes_in(served: Served) -> None:
    async def close() -> None:
        served.server._door.stop()

    served.run(close())
    with raw(served) as dealer:
        tell(dealer, hello(served))
        assert hear(dealer, 0.3) is None


def test_a_server_that_admits_all_is_told_apart(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of ours sends nothing to who does not hold the server's secret key, even if he lets anybody in."""
    monkeypatch.setattr(sockets, "LINGER", 100)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as false:
        false.linger = 0
        false.curve_server = True
        false.curve_publickey, false.curve_secretkey = zmq.curve_keypair()
        port = false.bind_to_random_port("tcp://127.0.0.1")
        key = auth.server_keys(rundir).public
        publish(
            rundir, RolloutPeer(host="127.0.0.1", port=port, run_id=PLAN.run_id, attempt=PLAN.attempt, public_key=key)
        )
        with pytest.raises(DeadlineError, match=r"did not welcome.*\(the encrypted handshake fails:"):
            QueueClient(rundir, PLAN, 0, 2, 2.0)
        assert false.poll(0) == 0


def test_a_client_with_keys_of_another_attempt_is_told(served: Served) -> None:
    public = auth.server_keys(served.rundir).public
    old = auth.client_keys(served.rundir, 0)
    auth.make_keys(served.rundir, 2)
    assert old != auth.client_keys(served.rundir, 0)
    with pytest.raises(PeerError, match=r"rollout-0 on 127.0.0.1:\d+ has another key than .*keys names"):
        served.client()
    # a key that the server does not know, under the right server key
    path = served.rundir.keys / "queue-client-0.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(auth.client_keys(served.rundir, 0), server=public)))
    begun = time.monotonic()
    with pytest.raises(PeerError, match=r"key of trainer DP.*0 on \S+; do.*keys.*server belong to the same"):
        served.client()
    assert time.monotonic() - begun < 5 * slowdown()


def test_another_run_is_told_by_both_sides(served: Served) -> None:
    other = Plan("run-b", 1, PLAN.trainers, (), HERE)
    with pytest.raises(
        PeerError,
        match=r"rollout-0 on.*belongs to run run-a,.*0; trainer DP rank 0 on \S+ to run run-b, attempt 1",
    ):
        served.client(plan=other)
    with raw(served) as dealer:
        tell(dealer, hello(served, run_id="run-b", attempt=1))
        answer = hear(dealer)
        assert "belongs to run run-b" in answer.what and "process to run run-a" in answer.what


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "other"}, "belongs to run other"),
        ({"attempt": 2}, "rollout process to run"),
        ({"dp_rank": 0}, "key of DP rank 1"),
        ({"dp_size": 4}, "counts 4 DP ranks, the rollout"),
        ({"protocol": 9}, "speaks queue protocol 9"),
    ],
)
def test_who_does_not_fit_is_refused(
    served: Served, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    with raw(served, 1) as dealer:
        tell(dealer, hello(served, 1, **changes))
        answer = hear(dealer)
    assert (answer.to, message in answer.what) == (messages.HELLO, True)
    assert message in capfd.readouterr().err


def test_welcome_of_another_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not accept a welcome from another run."""
    monkeypatch.setattr("hpcrl.transport.server.Rank.refusal", lambda *_: None)
    served.server._plan = Plan("run-b", 4, PLAN.trainers, (), HERE)
    with pytest.raises(
        PeerError,
        match="run run-b, attempt 4, protocol 4;.* to run run-a,.*0, protocol 4",
    ):
        served.client()


def test_a_rank_cannot_have_anothers_share(served: Served) -> None:
    served.put(0, share(0), share(0, seed=1))
    with raw(served, 1) as dealer:
        tell(dealer, hello(served, 0), Fetch(0, 1))
        answer = hear(dealer)
        assert "it is DP rank 0" in answer.what and "key of DP rank 1" in answer.what
        message, frames = hear_all(dealer)
        assert (message.to, frames) == (("share", 0), [bytes(frame) for frame in encode(share(0, seed=1))])
        assert hear(dealer, 0.05) is None


def test_rank_cannot_impersonate(served: Served) -> None:
    """Were names of the client's choice allowed, what was sent to a client that left would count as sent to whoever
    takes its name."""

    def name(dealer: zmq.Socket) -> None:
        dealer.routing_id = b"rank-0"

    for rank in (0, 1):
        with raw(served, rank, name) as dealer:
            tell(dealer, hello(served, rank))
            assert "an unnamed socket" in hear(dealer).what


def test_a_newer_client_simply_asks(served: Served, client: QueueClient, ran: list[str]) -> None:
    """It gets what the rank has not, and its calls are its own."""
    for rollout_id in range(2):
        served.put(rollout_id, share(rollout_id), share(rollout_id, seed=1))
    client.call("echo")
    client.fetch(0)
    second = served.client()
    assert second.call("echo") == {"got": {}} and len(ran) == 2
    until(lambda: list(served.server._ranks[0].shares) == [1])
    with pytest.raises(PeerError, match="share of rollout 0 was delivered"):
        second.fetch(0)
    assert same(second.fetch(1), share(1))
    second.close()


# ---- keys and addresses


def test_keys_are_for_the_owner_alone(rundir: RunDir) -> None:
    assert stat.S_IMODE(rundir.keys.stat().st_mode) == 0o700
    files = {path.name: path for path in rundir.keys.iterdir()}
    assert files.keys() == {"queue-server.json", "queue-client-0.json", "queue-client-1.json", "http.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    server = auth.server_keys(rundir)
    client = auth.client_keys(rundir, 1)
    assert server.clients[1] == client.public
    assert client.server == server.public
    assert server.secret not in files["queue-client-1.json"].read_text()
    assert server.secret not in repr(server) and client.secret not in repr(client)
    keys = {auth.http_key(rundir, index, life) for index in range(3) for life in range(3)}
    assert len(keys) == 9 and all(len(bytes.fromhex(key)) == 32 for key in keys)


def test_new_keys_replace_all_old_ones(rundir: RunDir) -> None:
    before = auth.http_key(rundir, 0), auth.server_keys(rundir)
    auth.make_keys(rundir, 1)
    assert before[0] != auth.http_key(rundir, 0)
    assert not set(before[1].clients) & set(auth.server_keys(rundir).clients)
    with pytest.raises(HpcrlError, match=r"cannot read key file .*queue-client-1.json: No such file"):
        auth.client_keys(rundir, 1)
    (rundir.keys / "queue-client-0.json").write_text("{")
    with pytest.raises(HpcrlError, match=r"key file .*queue-client-0.json is damaged"):
        auth.client_keys(rundir, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_never_listens_on_every_interface(host: str) -> None:
    with pytest.raises(UsageError, match="every interface"):
        sockets.bind_address(Plan("r", 0, (HERE,), (), Location(host, ())))


def test_loopback_address_for_other_hosts() -> None:
    """A loopback address is of no use to other hosts."""
    with pytest.raises(UsageError, match="other hosts cannot reach"):
        sockets.bind_address(Plan("r", 0, (Location("node1", (0,)),), (), Location("127.0.0.1", ())))
    with pytest.raises(UsageError, match="plan has no address"):
        sockets.bind_address(Plan("r", 0, (HERE,), (), Location("no-such-host", ())))


def test_listens_on_the_plans_host(rundir: RunDir) -> None:
    """The server listens on the plan's host on a port that the system chose."""
    away = Plan("run-a", 0, (Location("192.0.2.1", (0,)),), (), Location("192.0.2.1", ()))
    with pytest.raises(HpcrlError, match="queue cannot listen on 192.0.2.1:.*; is this the host"):
        Served(rundir, plan=away)
    one, two = Served(rundir), find(rundir, RolloutPeer)
    assert two.host == "127.0.0.1"
    assert (two.port > 0, two.run_id, two.attempt) == (True, "run-a", 0)
    assert two.public_key == auth.server_keys(rundir).public
    one.close()


# ---- real processes


TRAINER = """
import sys, time
from hpcrl.transport import client, messages
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import RunDir

rundir, rollout_id, when = RunDir(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
plan = read_plan(rundir)
queue = client.QueueClient(rundir, plan, 0, 2, 20)

def hang(*_):
    print("holding", flush=True)
    time.sleep(60)

if when == "before decoding":
    client.decode = hang
elif when == "before it is read":
    queue._receive = hang
elif when == "in a call":
    queue.call("echo", n=1)
    hang()
queue.fetch(rollout_id)
"""


@pytest.mark.process
@pytest.mark.parametrize("when", ["before it is read", "before decoding", "in a call"])
def test_trainer_killed_before_it_says_done(served: Served, ran: list[str], when: str) -> None:
    """A trainer killed before it has checked a share leaves everything to the next."""
    for rollout_id in range(2):
        served.put(rollout_id, share(rollout_id, answers=LONG), share(rollout_id, seed=1))
    command = [sys.executable, "-c", TRAINER, str(served.rundir.root), "0", when]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(REPO)}
    ) as process:
        assert read_line(process) == "holding\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT)
    client = served.client()
    got = [client.fetch(rollout_id) for rollout_id in range(2)]
    assert all(same(its, share(rollout_id, answers=LONG)) for rollout_id, its in enumerate(got))
    assert client.call("echo", n=2) == {"got": {"n": 2}}
    assert len(ran) == 1 + (when == "in a call")
    until(lambda: served.server._ranks[0].first == 2)
    with pytest.raises(DeadlineError):
        client.fetch(2, 0.1)  # nothing is there twice
    client.close()


SERVER = """
import asyncio, sys
from hpcrl.transport.server import QueueServer
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import RunDir

async def main():
    rundir = RunDir(sys.argv[1])
    server = QueueServer(rundir, read_plan(rundir), 2, {})
    await server.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.process
def test_killed_rollout_process_is_reported(rundir: RunDir) -> None:
    """A killed rollout process is reported as soon as it is recorded."""
    command = [sys.executable, "-c", SERVER, str(rundir.root)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPO)}) as process:
        client = QueueClient(rundir, PLAN, 0, 2, WAIT)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT)
    threading.Timer(0.1, lambda: rundir.fail("rollout", 0, "ended with signal 9")).start()
    begun = time.monotonic()
    with pytest.raises(PeerError, match="^rollout-0: ended with signal 9$"):
        client.fetch(0)
    assert time.monotonic() - begun < 10
    client.close()


# ---- what strangers cost


def test_a_call_larger_than_a_frame_arrives_whole(served: Served) -> None:
    client = served.client()
    text = "x" * (3 * messages.PIECE_BYTES + 5)
    assert client.call("echo", text=text) == {"got": {"text": text}}
    assert max(client._socket.maxmsgsize, served.server._socket.maxmsgsize) < len(text)
    client.close()


def test_more_idle_connections_than_files(served: Served) -> None:
    """More idle connections than files may be open at first."""
    import resource
    import socket

    from hpcrl.run.process import raise_file_limit

    peer = find(served.rundir, RolloutPeer)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    raise_file_limit()
    idle = [socket.create_connection((peer.host, peer.port)) for _ in range(300)]
    client = served.client()
    assert client.call("echo") == {"got": {}}
    client.close()
    for one in idle:
        one.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
