"""Verdicts in real boxes: what the policy leaves is carried over, and nothing that it does writes its own verdict."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.sandbox import Box, SandboxLost, SandboxPool
from hpcrl.sandbox.box_root import WORK
from hpcrl.sandbox.harbor.images import read_images
from hpcrl.sandbox.harbor.leftovers import NothingLeft, pack
from hpcrl.sandbox.harbor.task import HarborTask, read_task
from hpcrl.sandbox.harbor.verdict import TaskVerdict, check_verifier, collect, run_in, task_box, verdict
from hpcrl.sandbox.pool import default_pool
from tests.support.able import needs
from tests.support.harbor_tasks import DOCKERFILE, TOML, write_image, write_task

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
PYTHON = "/usr/bin/python3"
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
        left = await collect(task, box)
    return await verdict(task, left)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    return read(write_task(tmp_path_factory.mktemp("tasks") / "sum"))


def test_what_is_left_is_judged(loop: asyncio.Runner, task: HarborTask) -> None:
    """Nothing earns 0, the sum 1; a file that was removed is not there; modes and links are as they were left, but for
    set-user-ID; the verifier's home is none of the policy's."""
    assert loop.run(judged(task)).reward == 0.0
    assert loop.run(judged(task, "s=0; for n in $(cat data/numbers.txt); do s=$((s+n)); done; echo $s > sum.txt")) == (
        TaskVerdict(1.0)
    )
    tests = 'set -- $(readlink l) $(stat -c %a run) $(ls -A data | wc -l) $HOME; echo "$*"; [ "$*" = "a.b 755 0 /tmp" ]'
    verifier = f"#!/bin/sh\n{tests}\necho $? > /logs/verifier/reward.txt\n"
    dockerfile = f"{DOCKERFILE}ENV HOME=/app\n"  # where the policy writes
    looks = read(write_task(task.folder.parent / "looks", verifier=verifier, dockerfile=dockerfile))
    found = loop.run(judged(looks, "rm data/*; ln -s a.b l; echo 1 > run; chmod 4755 run"))
    assert (found.reward, found.said) == (0.0, "a.b 755 0 /tmp\n")


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &",
        "mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "rm -rf /app/data; ln -s /tests /app/data; ln -s /logs/verifier /app/v",
        "mkdir bin; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > bin/cat; chmod +x bin/cat",
        f"cd {WORK}; echo 'echo 1 > /logs/verifier/reward.txt' > .bashrc; cp .bashrc .profile",
        "mkfifo pipe; ln -s /proc/self/root root; ln -s /app/loop loop",
    ],
)
def test_no_policy_writes_its_verdict(command: str, loop: asyncio.Runner, task: HarborTask) -> None:
    """A verdict, programs, tests or processes of its own are in its box alone; and the verifier comes to its 0."""
    always = read(write_task(task.folder.parent / "always", verifier=ALWAYS_0))
    assert loop.run(judged(always, command)) == TaskVerdict(0.0)


PUT = """
import io, sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
def put(name, kind=tarfile.REGTYPE, link="", size=1):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size if kind == tarfile.REGTYPE else 0
    out.addfile(info, io.BytesIO(bytes(size)))
"""
OUTSIDE = """
put("app/v", tarfile.SYMTYPE, "/logs/verifier")
put("app/v/reward.txt")
put("logs/verifier/reward.txt")
put("/logs/verifier/reward.json")
put("app/../logs/verifier/reward.txt")
put("app/hard", tarfile.LNKTYPE, "/etc/passwd")
put("app/itself", tarfile.LNKTYPE, "app/itself")
put("app/good")
put("app/same", tarfile.LNKTYPE, "app/good")
"""
BOMB = """
put("app/0", size=50 << 20)
for i in range(1, 8):
    put(f"app/{i}", tarfile.LNKTYPE, f"app/{i - 1}")
"""


def packed(task: HarborTask, code: str, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What is taken where the policy has put this program in tar's place."""

    async def archive() -> bytes:
        async with task_box(task) as box:
            started = box.start

            async def start(command: Any, **more: Any) -> Any:
                return await started([PYTHON, "-c", f"{PUT}{code}out.close()"], **more)

            monkeypatch.setattr(box, "start", start)
            return await pack(box, task.carried)

    return loop.run(archive())


def test_hostile_archives(loop: asyncio.Runner, task: HarborTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that the policy made up no name outside of its places is taken, and none below a link; a bomb is not."""
    with tarfile.open(fileobj=io.BytesIO(packed(task, OUTSIDE, loop, monkeypatch))) as taken:
        found = sorted((member.name, member.type) for member in taken)
    assert found == [("app/good", tarfile.REGTYPE), ("app/same", tarfile.REGTYPE), ("app/v", tarfile.SYMTYPE)]
    with pytest.raises(NothingLeft, match="more than"):
        packed(task, BOMB, loop, monkeypatch)
    with pytest.raises(NothingLeft, match="cannot be read"):
        packed(task, "sys.stdout.write('no archive' * 1000)\n", loop, monkeypatch)


def test_work_that_prevents_a_verdict(loop: asyncio.Runner, task: HarborTask) -> None:
    """It earns 0, for the verifier has one for an untouched box: what it runs kills it, takes too long, or is too much."""
    runs = "#!/bin/sh\nsh ./mine.sh\n[ -e sum.txt ]; echo $? > /logs/verifier/reward.txt\n"
    mine = read(write_task(task.folder.parent / "runs", TOML.replace("10.0", "3.0"), runs))
    planted = "echo 1 > /logs/verifier/reward.txt; "
    for command in (f"echo '{planted} kill -9 $PPID' > mine.sh", f"echo '{planted} sleep 100' > mine.sh"):
        found = loop.run(judged(mine, command))
        assert (found.reward, found.parts) == (0.0, {"no_verdict": 1.0}), found
    left = loop.run(judged(mine, "for i in 1 2 3 4 5 6 7; do truncate -s 60M $i; done"))
    assert (left.reward, left.parts) == (0.0, {"no_verdict": 1.0})


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        ("echo broken; exit 3\n", "broken"),
        ("echo nan > /logs/verifier/reward.txt\n", "nan"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n', "reward"),
        ("sleep 30\n", "took more than 1 s"),
    ],
)
def test_a_verifier_that_cannot_run(verifier: str, said: str, loop: asyncio.Runner, tmp_path: Path) -> None:
    """It is an error that names tests/test.sh, and no response is graded by it."""
    broken = read(write_task(tmp_path / "sum", TOML.replace("10.0", "1.0"), f"#!/bin/sh\n{verifier}"))
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


def test_artifacts_alone(loop: asyncio.Runner, tmp_path: Path) -> None:
    """A separate verifier sees the environment as it was, and of the policy's work what the task names."""
    toml = 'artifacts = ["out"]\n' + TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    looks = "#!/bin/sh\ncat out data/numbers.txt\necho 1 > /logs/verifier/reward.txt\n"
    found = loop.run(judged(read(write_task(tmp_path / "sum", toml, looks)), "echo mine | tee out data/numbers.txt"))
    assert found.said == "mine\n3\n4\n5\n"


def test_programs_of_an_image_that_were_replaced(loop: asyncio.Runner, tmp_path: Path) -> None:
    """In the policy's layer over an image it may replace every program, tar too; the verdict is made with the image's."""
    folder = write_task(tmp_path / "tasks" / "sum")
    image = write_image(tmp_path / "image")
    (folder.parent / "images.toml").write_text(f'"debian:12" = "{image}"\n')
    task = read(folder)
    assert (task.image, task.workdir) == (str(image), "/app")
    assert loop.run(judged(task, "echo 12 > sum.txt")).reward == 1.0
    fake = "printf '#!/bin/sh\\necho 12\\n' > /bin/fake; chmod 755 /bin/fake; echo 3 > sum.txt"
    assert loop.run(judged(task, f"{fake}; mv /bin/fake /bin/cat")) == TaskVerdict(0.0)
    broken = loop.run(judged(task, f"{fake}; mv /bin/fake /bin/tar"))
    assert (broken.reward, broken.parts) == (0.0, {"no_verdict": 1.0})
    assert not (image / "bin" / "fake").exists()


def test_a_lost_box_is_no_verdict(loop: asyncio.Runner, task: HarborTask) -> None:
    """Lost before or while the verdict is made, it is never a reward."""

    async def lost(box: Box) -> None:
        box._line.end("the node had no memory left")

    async def play() -> None:
        async with task_box(task) as box:
            await lost(box)
            await collect(task, box)

    with pytest.raises(SandboxLost):
        loop.run(play())


def test_more_policies_than_boxes(loop: asyncio.Runner, task: HarborTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict waits for a box while it holds another: four of them come to their end over one box."""

    async def play() -> list[float]:
        async with SandboxPool(warm=0, most=1) as pool:
            monkeypatch.setattr("hpcrl.sandbox.pool.default_pool", lambda: pool)
            found = await asyncio.gather(*(judged(task, "echo 12 > sum.txt") for _ in range(4)))
        return [each.reward for each in found]

    assert loop.run(asyncio.wait_for(play(), 60)) == [1.0] * 4
