"""What a process says of its sandboxes: each change once, failures by cause, and the commands of a call."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, Unconfined, accounts
from hpcrl.sandbox.accounts import COMMANDS, LONGEST, Recording, news, recording
from hpcrl.sandbox.box_line import BoxLine
from hpcrl.sandbox.pool import PoolCounts
from tests.support.able import needs

pytestmark = pytest.mark.process
#: a command that reaches each limit of LIMITS, and no other
LIMITS = BoxLimits(memory=64 << 20, disk=4 << 20, processes=20, seconds=20.0, cpu=1, output=1000)
COMMANDS_OF = {
    "output": ("yes | head -c 100000", None),
    "time": ("sleep 100", 0.2),
    "disk": ("head -c 8000000 /dev/zero > big; false", None),
    "cpu": ("rm -f big; while :; do :; done", None),
    "memory": ("x=$(head -c 200000000 /dev/zero | tr '\\0' x); sleep 20", None),
    "processes": ("for i in $(seq 40); do sleep 20 & done; wait", None),
}


class Counted(accounts.CountedPool):
    """A pool of another kind."""

    def __init__(self, **counts: Any) -> None:
        super().__init__()
        self.found = PoolCounts(**counts)

    def counts(self) -> PoolCounts:
        return self.found


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    gc.collect()
    news()


def told() -> tuple[dict[str, int], dict[str, float]]:
    found = news()
    assert found is not None
    return found.states, found.more


@needs("namespaces")
def test_failures_by_cause_and_commands() -> None:
    """A command at each limit counts as that alone, and is recorded with it; so is what uses boxes, in seconds."""

    async def work() -> Recording:
        with recording() as found:
            async with SandboxPool(1) as pool, pool.box("system", LIMITS) as box, pool.box() as other:
                assert told()[0]["used"] == 2
                assert (await box.run("exit 3")).code == 3
                for command, seconds in COMMANDS_OF.values():
                    await box.run(command, seconds)
                await other.run(["echo", "a", "b"])
                assert pool.counts().seconds > 2 * 0.2
                process = await box.start("cat")
                await process.kill()
                await other.run("exit 1" + " " * 5000)
        return found

    found = asyncio.run(asyncio.wait_for(work(), 120))
    first, *limited, words, started, long = found.commands()
    assert (first.box, first.code, first.limits) == (1, 3, []) and first.seconds >= 0
    assert [(one.command, list(one.limits)) for one in limited] == [
        (command, [cause]) for cause, (command, _) in COMMANDS_OF.items()
    ]
    assert (words.command, words.box, started.code) == ("echo a b", 2, None)
    assert LONGEST < len(long.command) < LONGEST + 10 and words.at <= started.at
    states, more = told()
    assert states == {"used": 0, "warm": 0, "making": 0}
    assert {name: count for name, count in more.items() if name in accounts.CAUSES} == dict.fromkeys(COMMANDS_OF, 1)
    assert news() is None


@needs("namespaces")
def test_a_lost_box_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> Recording:
        with recording() as found:
            async with SandboxPool(0) as pool:
                async with pool.box() as box:
                    box._line.end("the test ends it")
                    with pytest.raises(SandboxLost):
                        await box.run("echo")

                async def refused(*_: Any) -> None:
                    raise Unconfined("none here")

                monkeypatch.setattr(BoxLine, "make", refused)
                with pytest.raises(Unconfined):
                    async with pool.box():
                        pass
        return found

    [lost] = asyncio.run(asyncio.wait_for(work(), 120)).commands()
    assert (lost.command, lost.code) == ("echo", None)
    more = told()[1]
    assert (more["lost"], more["unconfined"], more["handed_out"]) == (1, 1, 1)


def test_what_was_said_is_not_said_again() -> None:
    """Of pools of any kind; one that is gone takes nothing back."""
    first, second = Counted(used=1, made=3, waited=0.5, seconds=2.0), Counted(made=2)
    assert told() == ({"used": 1, "warm": 0, "making": 0}, {"made": 5, "waited": 0.5, "seconds": 2.0})
    assert news() is None
    second.found = PoolCounts(made=4, warm=1)
    assert told() == ({"used": 1, "warm": 1, "making": 0}, {"made": 2})
    del first
    gc.collect()
    assert told() == ({"used": 0, "warm": 1, "making": 0}, {})
    assert second.found.made == 4


def test_a_recording_is_bounded() -> None:
    """The first and the last commands stay; other tasks' are not in it."""
    accounts.ran(object(), "outside", 0, 0.0)
    with recording() as found:
        for number in range(COMMANDS + 50):
            accounts.ran(found, f"echo {number}", 0, 0.0)
    kept = [one.command for one in found.commands()]
    assert (len(kept), found.left_out) == (COMMANDS, 50)
    assert kept[0] == "echo 0" and kept[COMMANDS // 2 - 1 :][:2] == ["echo 99", "echo 150"] and kept[-1] == "echo 249"
