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

import pytest

from hpcrl.errors import UsageError
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, sandbox
from hpcrl.sandbox.pool import default_pool
from tests.support.able import needs
from tests.support.boxes import alive, family
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
            assert pool.counts().waited >= 0.2 and pool.counts().lost == 0
            assert pool._spawner is not None
            left = family(pool._spawner.pid)
            assert len(left) >= 7
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
            assert pool._spawner is not None
            spawner = pool._spawner
            await until(lambda: len(spawner._lines) == 4)

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
        spawner = default_pool()._spawner
        assert spawner is not None
        left.update(family(spawner.pid))

    async def next_loop() -> None:
        await until(lambda: gone(left))
        await default_pool().close()

    run(leave())
    assert len(left) >= 3 and not gone(left)

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
    """Its keeper, or its first process, is killed from outside: what it was asked raises `SandboxLost`."""

    async def work() -> None:
        async with SandboxPool(warm=0) as pool:
            for which in ("keeper", "first"):
                async with pool.box() as box:
                    assert pool._spawner is not None
                    keeper, first = sorted(family(pool._spawner.pid) - {pool._spawner.pid})
                    assert (await box.run("(sleep 4731 > /dev/null &)")).ok
                    asked = asyncio.create_task(box.run("sleep 4731"))
                    await until(lambda: len(sleepers("4731")) == 2)
                    os.kill(keeper if which == "keeper" else first, signal.SIGKILL)
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
            assert pool._spawner is not None
            stuck = family(pool._spawner.pid) - {pool._spawner.pid}
            os.kill(max(stuck), signal.SIGSTOP)
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
            assert pool._spawner is not None
            first = max(family(pool._spawner.pid))
            hold = "/usr/bin/python3 -c \"import time; time.sleep(1); x = b'x' * (100 << 20); time.sleep(60)\""
            asked = asyncio.create_task(box.run(hold, 30.0))
            await until(lambda: len(family(pool._spawner.pid)) > 3)
            os.kill(first, signal.SIGSTOP)
            done = await asked
            assert "64 MiB" in done.limit and not done.ok
            with pytest.raises(SandboxLost):
                await box.run("true")

    run(work())


def test_the_spawner_is_killed_with_ten_boxes() -> None:
    """Each of them raises, nothing of them is left, and the pool has boxes again."""

    async def work() -> None:
        async with SandboxPool(warm=2) as pool:

            async def use() -> None:
                async with pool.box() as box:
                    await box.run("(setsid sleep 4732 > /dev/null &)")
                    await box.run("sleep 4732")

            tasks = [asyncio.create_task(use()) for _ in range(10)]
            await until(lambda: len(sleepers("4732")) == 20)
            assert pool._spawner is not None
            left = family(pool._spawner.pid)
            os.kill(pool._spawner.pid, signal.SIGKILL)
            raised = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, SandboxLost) for error in raised), raised
            await until(lambda: gone(left) and not sleepers("4732"))
            async with pool.box() as box:
                assert (await box.run("echo again")).stdout == "again\n"
            assert pool.counts().lost == 10

    run(work())


def test_a_box_of_a_spawner_before_ends_no_other() -> None:
    """Who leaves a lost box late does nothing to a box of the next spawner."""

    async def work() -> None:
        async with SandboxPool(warm=0) as pool:
            async with pool.box() as lost:
                assert pool._spawner is not None
                os.kill(pool._spawner.pid, signal.SIGKILL)
                with pytest.raises(SandboxLost):
                    await lost.run("sleep 60")
                late = pool.box()
                other = await late.__aenter__()
            await asyncio.sleep(0.3)
            assert (await other.run("echo still there")).stdout == "still there\n"
            await late.__aexit__(None, None, None)

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
    print(pool._spawner.pid, flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["spawner runs", "spawner stopped"])
def test_the_user_is_killed_with_ten_boxes(stopped: bool) -> None:
    """Nothing is left of any of them, nor of the spawner: a stopped one leaves itself alone, until it continues."""
    user = subprocess.Popen([sys.executable, "-c", USER], stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        spawner = int(read_line(user))
        left = family(spawner)
        assert len(left) >= 41
        if stopped:
            os.kill(spawner, signal.SIGSTOP)
        user.kill()
        user.wait(60)
        end = time.monotonic() + 30
        while sleepers("4733") and time.monotonic() < end:
            time.sleep(0.02)
        assert not sleepers("4733")
        if stopped:
            os.kill(spawner, signal.SIGCONT)
        while not gone(left) and time.monotonic() < end:
            time.sleep(0.02)
        assert gone(left)
    finally:
        user.kill()
        user.communicate(timeout=60)


CONFINED = """
import asyncio
from hpcrl.sandbox import SandboxPool, Unconfined
from hpcrl.sandbox.confine import confine, view_of_python

async def main():
    pool = SandboxPool()
    confine(view_of_python())
    try:
        async with pool.box():
            print("made")
    except Unconfined as error:
        print("refused:", error)

asyncio.run(main())
"""


def test_a_process_that_may_start_none() -> None:
    """Such as one of built-in rewards: one clear error, not one of a subprocess."""
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("refused:") and "spawner" in done.stdout, done
