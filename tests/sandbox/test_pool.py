"""Pools of boxes: made ahead, handed out once, counted, and gone with what made them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.errors import UsageError
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, sandbox
from hpcrl.sandbox.pool import default_pool
from tests.support.able import needs
from tests.support.boxes import alive, all_of, family, watchers
from tests.support.children import read_line

pytestmark = [pytest.mark.process, needs("namespaces", "python")]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def until(done: Callable[[], bool]) -> None:
    """Wait until it is true."""
    for _ in range(3000):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true within 30 s")


def sleepers(mark: str) -> list[int]:
    """The processes `sleep MARK`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", mark.encode()]:
            found.append(int(path.parent.name))
    return found


def gone(pids: set[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def test_boxes_are_ready_when_asked_for() -> None:
    """The counts say so, and a pool that is closed leaves no process."""

    async def work() -> None:
        async with SandboxPool(warm=3, most=2) as pool:
            await pool.prepare(3)
            assert (pool.counts().warm, pool.counts().made) == (3, 3)
            async with pool.box() as first, pool.box() as second:
                assert (await first.run("echo a > a; ls")).stdout == "a\n"
                assert (await second.run("ls")).stdout == ""
                counts = pool.counts()
                assert (counts.used, counts.handed_out) == (2, 2)
                third = asyncio.create_task(one(pool))
                await asyncio.sleep(0.2)
                assert not third.done()  # there may be two
            await third
            await until(lambda: pool.counts().warm == 3)
            assert pool.counts().waited > 0.1 and pool.counts().lost == 0
            left = all_of(pool)
            assert len(left) >= 3 * 3
        assert gone(left)
        with pytest.raises(UsageError):
            async with pool.box():
                pass

    async def one(pool: SandboxPool) -> None:
        async with pool.box() as box:
            assert (await box.run("ls")).stdout == ""

    run(work())


def test_images_that_are_not_used_any_more(tmp_path: Path) -> None:
    """Boxes of few kinds are kept ready: what was made for others ends."""

    async def work() -> None:
        async with SandboxPool(warm=1) as pool:
            for number in range(7):
                async with pool.box(limits=BoxLimits(processes=20 + number)):
                    pass
            await until(lambda: pool.counts().making == 0 and not pool._tasks)
            assert pool.counts().warm == 4
            await until(lambda: len(watchers(pool)) == 4)

    run(work())


def test_the_pool_of_a_process() -> None:
    async def work() -> None:
        async with sandbox() as box, sandbox(limits=BoxLimits(output=10)) as other:
            assert (await box.run("echo here")).stdout == "here\n"
            assert (await other.run("echo and rather more than that")).stdout_cut
        await default_pool().close()

    run(work())


def test_a_pool_whose_loop_has_ended() -> None:
    """It ends when the next loop asks for one."""
    left: set[int] = set()

    async def leave() -> None:
        async with sandbox() as box:
            assert (await box.run("true")).ok
        await until(lambda: len(all_of(default_pool())) >= 3)  # the next box has its processes
        left.update(all_of(default_pool()))

    async def next_loop() -> None:
        await until(lambda: gone(left))
        await default_pool().close()

    run(leave())
    assert left

    async def ask() -> None:
        async with sandbox() as box:
            assert (await box.run("true")).ok
        await next_loop()

    run(ask())


def test_numbers_of_a_pool() -> None:
    async def work() -> None:
        for words in ({"warm": -1}, {"most": 0}):
            with pytest.raises(UsageError, match=next(iter(words))):
                SandboxPool(**words)

    run(work())


def test_a_box_that_is_lost() -> None:
    """Its watcher, or its first process, is killed from outside: what it was asked raises `SandboxLost`."""

    async def work() -> None:
        async with SandboxPool(warm=0) as pool:
            for which in ("watcher", "first"):
                async with pool.box() as box:
                    watcher = box._line.pid
                    first = psutil.Process(watcher).children(recursive=True)[-1].pid  # one below the other
                    assert (await box.run("(sleep 4731 > /dev/null &)")).ok
                    asked = asyncio.create_task(box.run("sleep 4731"))
                    await until(lambda: len(sleepers("4731")) == 2)
                    os.kill(watcher if which == "watcher" else first, signal.SIGKILL)
                    with pytest.raises(SandboxLost):
                        await asked
                    with pytest.raises(SandboxLost):
                        await box.run("true")
                    await until(lambda: not sleepers("4731"))
                    await box.reset()
                    assert (await box.run("echo again")).stdout == "again\n"
            assert pool.counts().lost == 2

    run(work())


def test_a_box_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended rather than waited for."""
    monkeypatch.setattr("hpcrl.sandbox.box_line.GRACE", 0.5)

    async def work() -> None:
        async with SandboxPool(warm=0) as pool, pool.box() as box:
            stuck = all_of(pool)
            os.kill(next(pid for pid in stuck if len(family(pid)) == 1), signal.SIGSTOP)
            with pytest.raises(SandboxLost, match="no answer"):
                await box.run("true", 0.2)
            await box.reset()
            assert (await box.run("true")).ok
            await until(lambda: gone(stuck))

    run(work())


def test_a_box_that_cannot_end_what_runs_in_it() -> None:
    """Over a limit it is ended from outside, and that is the command's result: no loss, after which it would run
    again."""

    async def work() -> None:
        limits = BoxLimits(memory=64 << 20, disk=1 << 20)
        async with SandboxPool(warm=0, limits=limits) as pool, pool.box() as box:
            first = next(pid for pid in all_of(pool) if len(family(pid)) == 1)
            stopped = "import time\nwhile ') T ' not in open('/proc/1/stat').read():\n    time.sleep(0.05)\n"
            hold = f"/usr/bin/python3 -c \"{stopped}x = b'x' * (100 << 20); time.sleep(60)\""
            asked = asyncio.create_task(box.run(hold, 30.0))
            await until(lambda: len(all_of(pool)) > 3)
            os.kill(first, signal.SIGSTOP)
            done = await asked
            assert "64 MiB" in done.limit and not done.ok
            with pytest.raises(SandboxLost):
                await box.run("true")

    run(work())


def test_all_watchers_are_killed() -> None:
    """Each of them raises, nothing of them is left, and the pool has boxes again."""

    async def work() -> None:
        async with SandboxPool(warm=2) as pool:

            async def use() -> None:
                async with pool.box() as box:
                    await box.run("(setsid sleep 4732 > /dev/null &)")
                    await box.run("sleep 4732")

            tasks = [asyncio.create_task(use()) for _ in range(10)]
            await until(lambda: len(sleepers("4732")) == 20 and not pool.counts().making)
            left = all_of(pool)
            for pid in watchers(pool):
                os.kill(pid, signal.SIGKILL)
            raised = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, SandboxLost) for error in raised), raised
            await until(lambda: gone(left) and not sleepers("4732"))
            async with pool.box() as box:
                assert (await box.run("echo again")).stdout == "again\n"
            assert pool.counts().lost == 10

    run(work())


USER = """
import asyncio, sys
from hpcrl.sandbox import SandboxPool

async def use(pool, ready):
    async with pool.box() as box:
        await box.run("(setsid sleep 4733 > /dev/null &)")
        ready.release()
        await box.run("sleep 4733")

async def main():
    pool = SandboxPool(warm=2)
    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(use(pool, ready)) for _ in range(10)]
    for _ in tasks:
        await ready.acquire()
    print(*(line.pid for line in pool._lines), flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["watchers run", "watchers stopped"])
def test_the_user_is_killed_with_ten_boxes(stopped: bool) -> None:
    """Nothing is left of any of them, nor of their watchers: a stopped one leaves itself alone, until it continues."""
    user = subprocess.Popen([sys.executable, "-c", USER], stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        pids = [int(word) for word in read_line(user).split()]
        assert len(pids) >= 10
        asyncio.run(until(lambda: len(set().union(*map(family, pids))) >= 5 * 10))  # the last commands may begin late
        left = set().union(*map(family, pids))
        for pid in pids if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        user.kill()
        user.wait(60)
        end = time.monotonic() + 30
        while sleepers("4733") and time.monotonic() < end:
            time.sleep(0.02)
        assert not sleepers("4733")
        for pid in pids if stopped else ():
            os.kill(pid, signal.SIGCONT)
        while not gone(left) and time.monotonic() < end:
            time.sleep(0.02)
        assert gone(left)
    finally:
        user.kill()
        user.communicate(timeout=60)
