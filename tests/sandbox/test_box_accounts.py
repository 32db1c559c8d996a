"""Boxes of an ordinary user: the same as root's, of which the kernel and the file system let them do less."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.sandbox.test_attacks import readable_directory
from tests.support.able import needs
from tests.support.boxes import alive, family
from tests.support.children import read_line
from tests.support.second_user import make_user

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
#: prints a JSON object: what came of each question
PROGRAM = """
import asyncio, json, os, sys
package, own, others = sys.argv[1:4]
sys.path.insert(0, package)
os.environ["PYTHONPATH"] = package
from hpcrl.sandbox import BoxLimits, SandboxPool

FORKS = "f() { f | f & }; f; while :; do :; done"
HOLD = "/usr/bin/python3 -c \\"x = b'x' * (90 << 20); input()\\" < <(sleep 60)"
CHANGE = "echo mine > /etc/motd; echo $?; cat /etc/motd; rm -r /data/deep; mkdir /new; ls /new /data"

async def main():
    limits = BoxLimits(memory=128 << 20, processes=24, disk=8 << 20, inodes=200)
    found = {}
    async with SandboxPool(warm=1) as pool:
        async with pool.box(limits=limits) as box:
            found["user"] = (await box.run("id -u; stat -c %u .; touch /usr/x x; ls")).stdout
            done = await box.run(FORKS, 3.0)
            found["forks"] = f"{done.limit} {done.stderr[-200:]}"
            found["memory"] = (await box.run(f"{HOLD} & {HOLD}", 20.0)).limit
            found["disk"] = (await box.run("head -c 9M /dev/zero > x")).limit
            await box.reset()
            await box.write("a/b", b"c")
            found["file"] = (await box.read("a/b")).decode()
            found["served"] = (await box.run("cat a/b; ls -A /tmp")).stdout
        for name, image in (("own", own), ("others", others)):
            async with pool.box(image) as box:
                done = await box.run(CHANGE)
                found[name] = [box.layered, done.stdout]
                await box.reset()
                found[name].append((await box.run("cat /etc/motd /data/deep/file")).stdout)
    print(json.dumps(found))

asyncio.run(main())
"""


def make_image(root: Path) -> None:
    """A root file system that starts a shell."""
    for name in ("sh", "cat", "ls", "rm", "mkdir"):
        source = Path(shutil.which(name) or "").resolve()
        (root / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(source, root / "bin" / name)
        for word in subprocess.run(
            ["ldd", source], capture_output=True, text=True, timeout=60, check=True
        ).stdout.split():
            if word.startswith("/"):
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    for name, text in (("etc/motd", "of the image\n"), ("data/deep/file", "deep\n")):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)


def test_an_ordinary_user() -> None:
    """Limits hold as for root.  Of an image of the user's own all can be changed inside; of another user's what may be
    changed there by its modes alone, as outside.  Neither is ever changed itself."""
    user = make_user()
    with readable_directory() as folder:
        own = folder / "own"
        make_image(own)
        others = folder / "others"
        shutil.copytree(own, others, symlinks=True)
        for path in (own, *own.rglob("*")):
            os.chown(path, user.uid, user.gid)
        said = user.run(PROGRAM, str(folder / "package"), str(own), str(others))
        found = json.loads(said.splitlines()[-1]) if "{" in said else pytest.fail(said)
        for image in (own, others):
            assert (image / "etc" / "motd").read_text() == "of the image\n" and not (image / "new").exists()
    assert found["user"] == f"{user.uid}\n{user.uid}\nx\n"
    assert "24 processes" in found["forks"], found
    assert "128 MiB" in found["memory"] and "8 MiB" in found["disk"], found
    assert found["file"] == "c" and found["served"] == "c"
    assert found["own"] == [True, "0\nmine\n/data:\n\n/new:\n", "of the image\ndeep\n"]
    layered, changed, again = found["others"]
    assert layered and changed.splitlines()[1] == "of the image" and again == "of the image\ndeep\n"


#: makes three boxes in which something runs, says so, and waits
HOLDER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
os.environ["PYTHONPATH"] = sys.argv[1]
from hpcrl.sandbox import SandboxLost, SandboxPool

async def hold(pool, ready):
    async with pool.box() as box:
        assert (await box.run("(setsid sleep 4741 > /dev/null &)")).ok
        ready.release()
        try:
            await box.run("sleep 4741", 600.0)
        except SandboxLost:
            return "lost"

async def main():
    pool = SandboxPool(warm=0)
    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(hold(pool, ready)) for _ in range(3)]
    for _ in tasks:
        await ready.acquire()
    print(*(line.pid for line in pool._lines), flush=True)
    print(*await asyncio.gather(*tasks), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", ["watchers", "user"])
def test_nothing_is_left_of_an_ordinary_users_boxes(killed: str) -> None:
    """Signals at a parent's end, and ends of streams, hold for processes in a user's own namespaces as well."""
    user = make_user()
    with readable_directory() as folder:
        holder = user.start(HOLDER, str(folder / "package"))
        try:
            assert holder.stdout is not None
            watchers = [int(word) for word in read_line(holder).split()]
            left = {one for pid in watchers for one in family(pid)}
            assert len(watchers) == 3 and len(left) >= 3 * 4
            for pid in watchers if killed == "watchers" else [holder.pid]:
                os.kill(pid, signal.SIGKILL)
            if killed == "watchers":
                assert read_line(holder) == "lost lost lost\n"
            end = time.monotonic() + 30
            while any(alive(pid) for pid in left) and time.monotonic() < end:
                time.sleep(0.02)
            assert not any(alive(pid) for pid in left)
        finally:
            user.end()
            holder.stdout.close()
