"""Verdicts in real boxes: what the policy has left is judged, and what it planted or left running is gone by then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.sandbox import Box, SandboxLost, SandboxPool
from hpcrl.sandbox.harbor.task import HarborTask, read_images, read_task
from hpcrl.sandbox.harbor.verdict import TaskVerdict, check_verifier, run_in, task_box, verdict
from hpcrl.sandbox.pool import default_pool
from tests.support.able import needs
from tests.support.harbor_tasks import TOML, write_image, write_task

pytestmark = [pytest.mark.process, needs("namespaces")]
ALWAYS_0 = "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner
        runner.run(close())


async def close() -> None:
    await default_pool().close()


def read(folder: Path) -> HarborTask:
    return read_task(folder, read_images(folder.parent))


async def judged(task: HarborTask, *commands: str) -> TaskVerdict:
    """The verdict after a policy has run these commands."""
    async with task_box(task) as box:
        for command in commands:
            await run_in(box, task, command, 20.0)
        return await verdict(task, box)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    return read(write_task(tmp_path_factory.mktemp("tasks") / "sum"))


def test_what_is_left_is_judged(loop: asyncio.Runner, task: HarborTask) -> None:
    """Nothing earns 0, the sum 1; the verifier is told the task's variables and begins in the working directory."""
    assert loop.run(judged(task)).reward == 0.0
    assert loop.run(judged(task, "s=0; for n in $(cat data/numbers.txt); do s=$((s+n)); done; echo $s > sum.txt")) == (
        TaskVerdict(1.0)
    )
    tests = 'set -- $A $PWD $(ls -A data | wc -l); echo "$*"; [ "$*" = "b /app 0" ]'
    verifier = f"#!/bin/sh\n{tests}\necho $? > /logs/verifier/reward.txt\n"
    looks = read(write_task(task.folder.parent / "looks", f'{TOML}env = {{A = "b"}}\n', verifier))
    found = loop.run(judged(looks, "rm data/*"))
    assert (found.reward, found.said) == (0.0, "b /app 0\n")


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &",
        "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &",
        "mkdir -p /tests; printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "rm -rf /logs/verifier; mkdir /app/v; echo 1 > /app/v/reward.txt; ln -s /app/v /logs/verifier",
    ],
)
def test_a_planted_verdict_is_removed(command: str, loop: asyncio.Runner, task: HarborTask) -> None:
    """A verdict, tests and processes of the policy's are gone when the tests run, which come to their 0."""
    always = read(write_task(task.folder.parent / "always", verifier=ALWAYS_0))
    assert loop.run(judged(always, command)) == TaskVerdict(0.0)


def test_a_verdict_that_cannot_be_removed(loop: asyncio.Runner, task: HarborTask) -> None:
    """It is not read: that is work that prevents a verdict."""
    kept = "mkdir /logs/verifier/a; echo 1 > /logs/verifier/a/b; chmod 500 /logs/verifier/a"
    found = loop.run(judged(task, kept, "echo 1 > /logs/verifier/reward.txt; chmod 500 /logs/verifier"))
    assert (found.reward, found.parts) == (0.0, {"no_verdict": 1.0}) and "cannot be removed" in found.said


def test_work_that_prevents_a_verdict(loop: asyncio.Runner, task: HarborTask) -> None:
    """It earns 0, for the verifier has one for an untouched box: what it runs kills it, takes too long, or fills the
    disk."""
    runs = "#!/bin/sh\nsh ./mine.sh\n[ -e sum.txt ]; echo $? > /logs/verifier/reward.txt\n"
    mine = read(write_task(task.folder.parent / "runs", TOML.replace("10.0", "3.0"), runs))
    planted = "echo 1 > /logs/verifier/reward.txt; "
    for command in (
        f"echo '{planted} kill -9 $PPID' > mine.sh",
        f"echo '{planted} sleep 100' > mine.sh",
        "cat /dev/zero > full",
    ):
        found = loop.run(judged(mine, command))
        assert (found.reward, found.parts) == (0.0, {"no_verdict": 1.0}), found


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        ("echo broken; exit 3\n", "broken"),
        ("echo nan > /logs/verifier/reward.txt\n", "nan"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "reward"),
        ("sleep 30\n", "took more than 3 s"),
    ],
)
def test_a_verifier_that_cannot_run(verifier: str, said: str, loop: asyncio.Runner, tmp_path: Path) -> None:
    """It is an error that names tests/test.sh, and no response is graded by it."""
    broken = read(write_task(tmp_path / "sum", TOML.replace("10.0", "3.0"), f"#!/bin/sh\n{verifier}"))
    with pytest.raises(HpcrlError, match=rf"sum/tests/test\.sh .*{said}"):
        loop.run(judged(broken))


def test_json_comes_first(loop: asyncio.Runner, tmp_path: Path) -> None:
    """Its other numbers are the reward's parts; the variables of [verifier] are there, not those of the policy's home."""
    toml = TOML.replace("[verifier]", '[verifier]\nenv = {A = "0.5"}')
    verifier = (
        'echo 1 > /logs/verifier/reward.txt\necho "{\\"reward\\": $A, \\"style\\": 2}" > /logs/verifier/reward.json\n'
    )
    both = read(write_task(tmp_path / "sum", toml, verifier))
    found = loop.run(check_verifier(both))
    assert (found.reward, found.parts) == (0.5, {"style": 2.0})


def test_an_image_of_the_users(loop: asyncio.Runner, tmp_path: Path) -> None:
    """A task works in a directory of images.toml, which stays as it is."""
    folder = write_task(tmp_path / "tasks" / "sum")
    image = write_image(tmp_path / "image")
    (folder.parent / "images.toml").write_text(f'"debian:12" = "{image}"\n')
    task = read(folder)
    assert (task.image, task.workdir) == (str(image), "/app")
    assert loop.run(judged(task, "echo 12 > sum.txt")).reward == 1.0
    assert loop.run(judged(task, "echo 12 > /bin/made")).reward == 0.0
    assert not (image / "bin" / "made").exists()


def test_a_lost_box_is_no_verdict(loop: asyncio.Runner, task: HarborTask) -> None:
    """Lost before or while the verdict is made, it is never a reward."""

    async def lost(box: Box) -> None:
        box._line.end("the node had no memory left")

    async def play() -> None:
        async with task_box(task) as box:
            await lost(box)
            await verdict(task, box)

    with pytest.raises(SandboxLost):
        loop.run(play())


def test_more_policies_than_boxes(loop: asyncio.Runner, task: HarborTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict waits for a box while it holds another: four of them come to their end over one box, with none made
    by a verifier too."""

    async def play() -> list[float]:
        async with SandboxPool(warm=0, most=1) as pool:
            monkeypatch.setattr("hpcrl.sandbox.pool.default_pool", lambda: pool)
            commands = ["echo 12 > sum.txt", "cat /dev/zero > full"] * 2
            found = await asyncio.gather(*(judged(task, command) for command in commands))
        return [each.reward for each in found]

    assert loop.run(asyncio.wait_for(play(), 60)) == [1.0, 0.0] * 2
