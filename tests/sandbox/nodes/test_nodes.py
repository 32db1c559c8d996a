"""Boxes of other machines: the same as those of this one, and lost, ended and refused when a node or a client is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from hpcrl.errors import UsageError
from hpcrl.run.peers import SandboxPeer, newest, publish
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, sandbox
from hpcrl.sandbox import pool as pools
from hpcrl.sandbox.inside.frames import pack
from hpcrl.sandbox.nodes import client
from hpcrl.sandbox.nodes.client import NodesPool
from hpcrl.sandbox.nodes.location import VARIABLE, SandboxPlace, follow
from hpcrl.sandbox.nodes.server import BEAT, MOST, BoxRequest, SandboxServer
from hpcrl.transport.auth import make_keys, sandbox_key
from tests.sandbox.test_pool import run, sleepers, until
from tests.support.able import needs

pytestmark = [pytest.mark.process, needs("namespaces")]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path, 0)
    (found.here / "peers").mkdir(parents=True)
    make_keys(found, 1)
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
    server = SandboxServer(sandbox_key(rundir, index, incarnation), pool, said.append)
    peer = SandboxPeer(host="127.0.0.1", port=await server.start("127.0.0.1"), incarnation=incarnation)
    publish(rundir, peer, index)
    try:
        yield pool
    finally:
        await server.close()


def with_server(rundir: RunDir, work: Callable[[subprocess.Popen[bytes]], Coroutine[Any, Any, None]]) -> None:
    """Do this next to a node in a process of its own."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(rundir.root), "0"])
    try:
        run(work(server))
    finally:
        server.kill()
        server.wait(60)


def test_a_box_of_another_machine(rundir: RunDir) -> None:
    """Commands, files larger than a message, started processes, limits and a reset: as of a box here."""

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes:
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
        one.connect()
    await until(lambda: all(one.up for one in nodes._nodes))


SERVER = """
import asyncio, sys
from hpcrl.transport.auth import sandbox_key
from hpcrl.run.peers import SandboxPeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import SandboxPool
from hpcrl.sandbox.nodes.server import SandboxServer

async def main():
    rundir = RunDir(sys.argv[1], 0)
    server = SandboxServer(sandbox_key(rundir, int(sys.argv[2]), 0), SandboxPool(0, 64), print)
    publish(rundir, SandboxPeer(host="127.0.0.1", port=await server.start("127.0.0.1")), int(sys.argv[2]))
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

    with_server(rundir, work)


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


WISH = msgspec.json.encode(BoxRequest("system", vars(BoxLimits())))


@contextlib.asynccontextmanager
async def attached(rundir: RunDir, key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Requests as of a client of node 0."""
    peer = newest(rundir, SandboxPeer, 0)
    assert peer is not None
    key = sandbox_key(rundir, 0, peer.incarnation) if key is None else key
    session = aiohttp.ClientSession(f"http://{peer.host}:{peer.port}/x/", headers={"Authorization": f"Bearer {key}"})
    async with session, session.get("beats"):
        yield session


@pytest.mark.parametrize("key", ["", "\xe9", "0" * 64, "of another incarnation"])
def test_a_client_without_the_key_is_refused(rundir: RunDir, key: str) -> None:
    """It gets no answer, whatever it asks for, and costs no box."""

    async def work() -> None:
        async with node(rundir, warm=0, incarnation=1) as pool:
            wrong = sandbox_key(rundir, 0, 0) if key.startswith("of") else key
            async with attached(rundir, wrong) as stranger:
                for method, path in (("GET", "beats"), ("PUT", "boxes/1"), ("POST", "boxes/1")):
                    async with stranger.request(method, path, data=None if method == "GET" else WISH) as answer:
                        assert (answer.status, await answer.read()) == (401, b"")
            assert pool.counts().made == 0

    run(work())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "boxes/2", b""),
        ("PUT", "boxes/2", msgspec.json.encode({"image": "system", "limits": {"memory": "much"}})),
        ("PUT", "boxes/2", msgspec.json.encode({"image": "system", "limits": {"nonsense": 1}})),
        ("PUT", "boxes/x", WISH),
        ("POST", "boxes/1", b""),
        ("POST", "boxes/1", bytes(8192)),
        ("POST", "boxes/1", b"\xff" * 9),
        ("POST", "boxes/1", pack({"n": 1}) + pack({"n": 2})),
        ("POST", "boxes/1", pack({"do": "run"})),
        ("POST", "boxes/9", pack({"n": 1})),
        ("POST", "boxes/1", bytes(MOST + 1)),
        ("POST", "nonsense", b""),
    ],
    ids=str.split(
        "no-wish wrong-limit no-limit no-number nothing short unread two no-number-asked no-box large no-route"
    ),
)
def test_a_client_gone_astray_costs_no_other(rundir: RunDir, method: str, path: str, body: bytes) -> None:
    """Its request is answered with an error, and its box and those of others stay."""

    async def work() -> None:
        async with node(rundir, warm=0) as pool, NodesPool(rundir, 1) as nodes, nodes.box() as box:
            async with attached(rundir) as astray:
                async with astray.put("boxes/1", data=WISH) as answer:
                    assert answer.status == 200
                async with astray.request(method, path, data=body) as answer:
                    assert 400 <= answer.status < 500
                assert (await box.run("echo well")).stdout == "well\n"
                question = pack({"n": 7, "do": "list", "path": "/work"})
                async with astray.post("boxes/1", data=question) as answer:
                    assert answer.status == 200 and b"[]" in await answer.read()
                assert pool.counts().used == 2
            await until(lambda: pool.counts().used == 1)

    run(work())


def test_no_connection_no_boxes(rundir: RunDir) -> None:
    """Who does not listen to the node's beats has none."""

    async def work() -> None:
        async with node(rundir, warm=0) as pool, attached(rundir) as client:
            async with client.put("../y/boxes/1", data=WISH) as answer:
                assert answer.status == 409 and b"lost" in await answer.read()
            assert pool.counts().made == 0

    run(work())


def test_a_node_that_stands_still(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: it is lost after its silence, with a command that runs and a box that is asked for; that
    a client itself stands still for as long costs nothing."""
    monkeypatch.setattr(client, "SILENCE", 2 * BEAT)

    async def work(server: subprocess.Popen[bytes]) -> None:
        await until(lambda: newest(rundir, SandboxPeer, 0) is not None)
        async with NodesPool(rundir, 1) as nodes, nodes.box() as box:
            time.sleep(3 * BEAT)
            assert (await box.run("echo well")).stdout == "well\n"
            server.send_signal(signal.SIGSTOP)
            running = asyncio.create_task(box.run("sleep 600", 900))
            asked = asyncio.create_task(nodes._nodes[0].open("system", BoxLimits()))
            for lost in (running, asked):
                with pytest.raises(SandboxLost):
                    await asyncio.wait_for(lost, 30)
            assert not nodes._nodes[0].up and nodes._nodes[0].used == 0

    with_server(rundir, work)


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
            pool.closed = True  # no box is made there any more
            with pytest.raises(UsageError, match="closed"):
                await box.reset()
            pool.closed = False
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

    monkeypatch.setattr(client, "newest", fails_once)

    async def work() -> None:
        async with node(rundir), NodesPool(rundir, 1) as nodes, nodes.box() as box:
            assert (await box.run("true")).ok and len(looks) > 1

    run(work())


def test_wishes_that_are_taken_back_at_once(rundir: RunDir) -> None:
    """Nothing of them is left on the node."""

    async def work() -> None:
        async with node(rundir) as pool, NodesPool(rundir, 1) as nodes, nodes.box():
            for pause in (0, 0, 0.01, 0.05, 0.1, 0.2) * 5:
                wish = asyncio.create_task(nodes._nodes[0].open("system", BoxLimits()))
                await asyncio.sleep(pause)
                wish.cancel()
                found = (await asyncio.gather(wish, return_exceptions=True))[0]
                if not isinstance(found, BaseException):
                    found.line.end("it was not wanted")
            async with nodes.box() as box:
                assert (await box.run("true")).ok
            await until(lambda: pool.counts().used == nodes._nodes[0].used == 1)

    run(work())


def test_a_command_that_is_taken_back(rundir: RunDir) -> None:
    """It is ended, as in a box of this machine."""
    mark = "7302013"

    async def work() -> None:
        async with node(rundir), NodesPool(rundir, 1) as nodes, nodes.box() as box:
            command = asyncio.create_task(box.run(f"sleep {mark}", 600))
            await until(lambda: len(sleepers(mark)) == 1)
            command.cancel()
            await until(lambda: not sleepers(mark))
            assert (await box.run("echo well")).stdout == "well\n"

    run(work())
