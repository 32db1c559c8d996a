"""Boxes of other machines: the same as those of this one, and lost, ended and refused when a node or a client is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from hpcrl.errors import UsageError
from hpcrl.run.peers import SandboxPeer, newest, publish
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, sandbox
from hpcrl.sandbox import pool as pools
from hpcrl.sandbox.nodes import client, connection, wire
from hpcrl.sandbox.nodes.client import NodesPool
from hpcrl.sandbox.nodes.location import VARIABLE, SandboxPlace, follow
from hpcrl.sandbox.nodes.server import SandboxServer
from hpcrl.transport.auth import make_keys, server_keys
from tests.sandbox.test_pool import run, sleepers, until
from tests.support.able import needs

pytestmark = [pytest.mark.process, needs("namespaces")]


servers: list[SandboxServer] = []  #: of `node`


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path, 0)
    (found.here / "peers").mkdir(parents=True)
    make_keys(found, 1, sandboxes=True)
    return found


@contextlib.asynccontextmanager
async def node(
    rundir: RunDir,
    index: int = 0,
    warm: int = 1,
    most: int = 64,
    incarnation: int = 0,
) -> AsyncIterator[SandboxPool]:
    """A node with sandboxes, in this process."""
    said: list[str] = []
    pool = SandboxPool(warm, most)
    server = SandboxServer(server_keys(rundir, "sandboxes"), pool, said.append)
    servers.append(server)
    peer = SandboxPeer(host="127.0.0.1", port=server.start("127.0.0.1"), incarnation=incarnation)
    publish(rundir, peer, index)
    try:
        yield pool
    finally:
        await server.close()


def test_a_box_of_another_machine(rundir: RunDir) -> None:
    """Commands, files larger than a message, started processes, limits and a reset: as of a box here."""

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes:
            await nodes.prepare(2)
            assert pool.counts().warm >= 2
            async with nodes.box(limits=BoxLimits(memory=256 << 20, disk=64 << 20)) as box:
                assert (await box.run("echo hi; exit 3"))[:3] == (3, "hi\n", "")
                data = os.urandom(9 << 20)
                await box.write("file", data)
                assert await box.read("file") == data
                started = await box.start("cat")
                await started.write(b"spoken")
                assert await started.read() == b"spoken"
                both = await asyncio.gather(*(box.run(f"sleep 0.2; echo {n}") for n in range(3)))
                assert [one.stdout for one in both] == ["0\n", "1\n", "2\n"]
                assert "256 MiB" in (await box.run("exec python3 -c 'bytearray(1 << 29)'")).limit
                with pytest.raises(FileNotFoundError):
                    await box.read("nothing")
                await box.reset()
                assert await box.listing(".") == []
            await until(lambda: pool.counts().used == 0)
            counts = nodes.counts()
            assert (counts.used, counts.handed_out, counts.made, counts.lost) == (0, 1, 2, 0)

    run(work())


def test_what_a_node_refuses(rundir: RunDir, tmp_path: Path) -> None:
    """An image that is none is an error there and then: nothing is lost, and nothing is made again."""
    (none := tmp_path / "image.tar").write_bytes(b"no directory")

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes:
            with pytest.raises(UsageError, match="image.tar"):
                async with nodes.box(str(none)):
                    pass
            with pytest.raises(UsageError, match="nonsense"):
                async with nodes.box("/nonsense"):
                    pass
            assert pool.counts().used == nodes.counts().used == 0
        with pytest.raises(UsageError, match="closed"):
            async with nodes.box():
                pass

    run(work())


def test_more_boxes_than_a_node_has(rundir: RunDir) -> None:
    """Who asks for more waits; boxes are spread over the nodes."""

    async def work() -> None:
        async with node(rundir, 0, most=1) as first, node(rundir, 1, most=1) as second, NodesPool(rundir, 2) as nodes:
            await until_up(nodes)
            async with nodes.box(), nodes.box():
                assert first.counts().used == second.counts().used == 1

                async def third() -> str:
                    async with nodes.box() as box:
                        return (await box.run("echo third")).stdout

                waiting = asyncio.create_task(third())
                await until(lambda: nodes.counts().making == 1)
                assert not waiting.done()
            assert await waiting == "third\n"

    run(work())


async def until_up(nodes: NodesPool) -> None:
    for one in nodes._nodes:
        one.begin()
    await until(lambda: all(one.up for one in nodes._nodes))


SERVER = """
import asyncio, sys
from hpcrl.transport.auth import server_keys
from hpcrl.run.peers import SandboxPeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import SandboxPool
from hpcrl.sandbox.nodes.server import SandboxServer

async def main():
    rundir = RunDir(sys.argv[1], 0)
    server = SandboxServer(server_keys(rundir, "sandboxes"), SandboxPool(0, 64), print)
    publish(rundir, SandboxPeer(host="127.0.0.1", port=server.start("127.0.0.1")), int(sys.argv[2]))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_node_is_lost_with_fifty_boxes(rundir: RunDir) -> None:
    """Its server is killed: every command there raises, none has a result, nothing is left; those of another node end
    well; and the node is used again once it is there again."""
    mark = "7302011"

    async def one(nodes: NodesPool) -> str:
        try:
            async with nodes.box() as box:
                await box.write("go", b"")
                return (await box.run(f"sleep {mark} & while [ ! -e end ] && sleep 0.2; do :; done; echo ended")).stdout
        except SandboxLost:
            return "lost"

    async def work(server: subprocess.Popen[bytes]) -> None:
        await until(lambda: newest(rundir, SandboxPeer, 0) is not None)
        async with NodesPool(rundir, 1) as nodes:
            tasks = [asyncio.create_task(one(nodes)) for _ in range(50)]
            await until(lambda: len(sleepers(mark)) == 50)
            server.kill()
            assert await asyncio.gather(*tasks) == ["lost"] * 50
            await until(lambda: not sleepers(mark))
            assert nodes.counts().used == 0 and nodes.counts().lost == 50
            async with node(rundir, incarnation=1), nodes.box() as box:
                assert (await box.run("echo again")).stdout == "again\n"

    server = subprocess.Popen([sys.executable, "-c", SERVER, str(rundir.root), "0"])
    try:
        run(work(server))
    finally:
        server.kill()
        server.wait(60)


CLIENT = """
import asyncio, sys
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox.nodes.client import NodesPool

async def use(nodes):
    async with nodes.box() as box:
        await box.run("sleep " + sys.argv[2], 600)

async def main():
    async with NodesPool(RunDir(sys.argv[1], 0), 1) as nodes:
        await asyncio.gather(*(use(nodes) for _ in range(10)))

asyncio.run(main())
"""


def test_the_client_is_killed_with_ten_boxes(rundir: RunDir) -> None:
    mark = "7302012"

    async def work() -> None:
        async with node(rundir) as pool:
            user = subprocess.Popen([sys.executable, "-c", CLIENT, str(rundir.root), mark])
            await until(lambda: len(sleepers(mark)) == 10)
            user.send_signal(signal.SIGKILL)
            await asyncio.to_thread(user.wait)
            await until(lambda: not sleepers(mark) and pool.counts().used == 0)

    run(work())


def test_a_client_without_the_key_is_refused(rundir: RunDir) -> None:
    """A stranger that knows the server's public key gets no answer, and costs no box."""

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes:
            async with nodes.box():
                pass
            made = pool.counts().made
            peer = newest(rundir, SandboxPeer, 0)
            assert peer is not None
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                stranger.curve_serverkey = server_keys(rundir, "sandboxes").public.encode()
                stranger.connect(f"tcp://127.0.0.1:{peer.port}")
                request = msgspec.msgpack.encode(wire.BoxRequest("system", vars(BoxLimits())))
                stranger.send_multipart(wire.frames_of(wire.BoxMessage(wire.OPEN, 1, request)))
                assert not await asyncio.to_thread(stranger.poll, 1500)
            assert pool.counts().handed_out == 1 and pool.counts().made <= made + 1

    run(work())


@pytest.mark.parametrize(
    "message",
    [
        [b""],
        [b"O" * 9],
        [b"O" + bytes(8), b"\xc1"],
        [b"O" + bytes(8), msgspec.msgpack.encode({"image": "system", "limits": {"memory": "much"}})],
        [b"O" + bytes(8), msgspec.msgpack.encode({"image": "system", "limits": {"nonsense": 1}})],
        [b"D" + bytes(8), bytes(8192)],
        [b"T" + bytes(8), bytes(4)],
        [b"?" + bytes(8), b""],
    ],
)
def test_a_client_gone_astray_costs_no_other(rundir: RunDir, message: list[bytes]) -> None:
    async def work() -> None:
        async with node(rundir, warm=0) as pool, NodesPool(rundir, 1) as nodes, nodes.box() as box:
            sock = nodes._nodes[0]._socket
            assert sock is not None
            await sock.send_multipart(message)
            assert (await box.run("echo well")).stdout == "well\n"
            assert pool.counts().used == 1

    run(work())


def test_no_node_comes_up(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "COME_UP", 0.5)

    async def work() -> None:
        async with NodesPool(rundir, 2) as nodes:
            with pytest.raises(SandboxLost, match="sandbox-0.log"):
                async with nodes.box():
                    pass

    run(work())


@pytest.mark.parametrize("nodes", [0, 1])
def test_sandboxes_are_where_the_run_says(rundir: RunDir, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    place = SandboxPlace(str(rundir.root), 0, nodes)
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(place).decode())
    monkeypatch.setattr(pools, "_make", pools._make)
    made: list[Callable[[], object]] = []

    async def work() -> None:
        async with node(rundir) as there:
            follow()
            made.append(pools._make)
            async with sandbox() as box:
                assert (await box.run("echo here")).ok
                assert there.counts().used == nodes
            await pools.default_pool().close()

    run(work())
    assert made[0].func is (NodesPool if nodes else SandboxPool)  # type: ignore[attr-defined]


def test_a_reset_that_failed_may_be_asked_for_again(rundir: RunDir) -> None:
    async def work() -> None:
        async with NodesPool(rundir, 1) as nodes, node(rundir, warm=0) as pool, nodes.box() as box:
            pool._closed = True  # no box is made there any more
            with pytest.raises(UsageError, match="closed"):
                await box.reset()
            pool._closed = False
            await box.reset()
            assert (await box.run("echo new")).stdout == "new\n"

    run(work())


def test_a_node_with_trouble_of_its_own_says_so(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing here expects is an answer all the same: the box is lost, and nothing waits for it."""

    async def work() -> None:
        async with node(rundir, warm=0) as pool, NodesPool(rundir, 1) as nodes:

            async def no_room(*_: object) -> None:
                raise OSError(24, "Too many open files")

            with monkeypatch.context() as patch:
                patch.setattr(pool, "_take", no_room)
                with pytest.raises(SandboxLost, match="Too many open files"):
                    async with nodes.box():
                        pass
            async with nodes.box() as box:
                assert (await box.run("true")).ok

    run(work())


def test_a_run_directory_that_fails_for_a_moment(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is looked for again."""
    looks: list[int] = []

    def fails_once(*words: object) -> SandboxPeer | None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(5, "Input/output error")
        return newest(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(connection, "newest", fails_once)

    async def work() -> None:
        async with node(rundir), NodesPool(rundir, 1) as nodes, nodes.box() as box:
            assert (await box.run("true")).ok and len(looks) > 1

    run(work())


def test_wishes_that_are_taken_back_at_once(rundir: RunDir) -> None:
    """Nothing of them is left on the node."""

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes, nodes.box():
            sock = nodes._nodes[0]._socket
            assert sock is not None
            request = msgspec.msgpack.encode(wire.BoxRequest("system", vars(BoxLimits())))
            for number in range(1000, 1200):
                await sock.send_multipart(wire.frames_of(wire.BoxMessage(wire.OPEN, number, request)))
                await sock.send_multipart(wire.frames_of(wire.BoxMessage(wire.END, number)))
            async with nodes.box() as box:
                assert (await box.run("true")).ok
            await until(lambda: pool.counts().used == 1 and len(servers[-1]._relays) == 1)

    servers.clear()
    run(work())


def test_a_stream_in_small_pieces_is_bounded() -> None:
    """Each message takes of the window, so that few are under way however short they are."""

    async def work() -> None:
        window, taken = wire.SendWindow(), wire.TakenBytes()
        count = 0
        for _ in range(wire.WINDOW // wire.LEAST):
            await window.take(b"x")
            count += 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(window.take(b"x"), 0.2)
        for _ in range(count):
            if said := taken.due(b"x"):
                window.taken(int.from_bytes(said, "big"))
        for _ in range(count - wire.ACK // wire.LEAST):
            await window.take(b"x")

    run(work())


def test_leave_while_a_connection_ends(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is closed while its node's end is being noticed has closed every socket."""
    ending = asyncio.Event()

    async def slow(*_: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ending.set()
            await asyncio.sleep(0.1)

    monkeypatch.setattr(connection.NodeConnection, "_listen", slow)

    async def work() -> None:
        async with NodesPool(rundir, 1) as nodes:
            async with node(rundir, warm=0):
                await until_up(nodes)
            await ending.wait()
        assert nodes.closed

    run(work())
