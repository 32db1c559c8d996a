"""Boxes that another program makes: they work as ours do, keep out what ours do, and end as ours do.

All is done by an ordinary user's process, for such a box is refused to root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import UsageError
from hpcrl.sandbox import SandboxPool, Unconfined
from hpcrl.sandbox.kinds.choose import VARIABLE, chosen, kind_names, prepare
from tests.sandbox.test_attacks import ATTEMPTS, BOX, attack, readable_directory
from tests.support.harbor_tasks import write_image
from tests.support.other_kinds import KINDS, user_of

pytestmark = pytest.mark.process

#: what a user's process does, with names of its own; what it prints last is JSON
BEGIN = """
import asyncio, json, os, signal, sys, time
package, kind, told = sys.argv[1:4]
sys.path.insert(0, package)
os.environ.update(PYTHONPATH=package, TMPDIR=os.path.dirname(package) + "/tmp", HPCRL_TEST_SECRET="secret-of-the-run")
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool
LIMITS = BoxLimits(memory=256 << 20, processes=48, disk=16 << 20, inodes=500, output=1 << 16, seconds=30.0)
told = json.loads(told)

def children(pid):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid and words[0] != "Z":
            found.append(int(name))
    return sorted(found)

def family(pid):
    return [pid, *(one for child in children(pid) for one in family(child))]

def first_of(pool):
    found = []
    for pid in family(pool._spawner.pid):
        with open(f"/proc/{pid}/status") as file:
            if any(line.split()[1:][-1:] == ["1"] and line.startswith("NSpid") for line in file):
                found.append(pid)
    return found[-1]

def sleepers(mark):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if file.read().split(b"\\0")[:2] == [b"sleep", mark.encode()]:
                    found.append(int(name))
        except OSError:
            pass
    return found

async def until(done):
    for _ in range(1000):
        if done():
            return True
        await asyncio.sleep(0.02)
    return False
"""
END = """
print(json.dumps(asyncio.run(asyncio.wait_for(main(), 150))))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory with this package, and one for what boxes need, which the user can write to."""
    with readable_directory() as folder:
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        yield folder


def done_by(kind: str, place: Path, program: str, told: Any = None) -> Any:
    """What a user's program prints as JSON."""
    said = user_of(kind).run(BEGIN + program + END, str(place / "package"), kind, json.dumps(told), timeout=170)
    lines = said.strip().splitlines()
    assert lines and lines[-1][:1] in "[{", said[-3000:]
    return json.loads(lines[-1])


USED = """
async def main():
    found = {}
    async with SandboxPool(warm=1, limits=LIMITS, kind=kind) as pool:
        async with pool.box() as box:
            await box.write("deep/a", b"from outside")
            found["first"] = (await box.run("cat deep/a; pwd; echo x > /tmp/b; (sleep 4801 > /dev/null &); id -u")).stdout
            found["second"] = (await box.run("cat /tmp/b; until pgrep -f '^sleep 4801' > /dev/null; do sleep 0.02; done; echo runs")).stdout
            found["written"] = (await box.run("for p in / /usr /etc /.hpcrl; do : > $p/x; done")).stderr
            process = await box.start("cat")
            await process.write("spoken to", last=True)
            found["spoken"] = (await process.read()).decode()
            found["layered"] = box.layered
            await box.reset()
            found["reset"] = (await box.run("ls -A; ls -A /tmp")).stdout
        for name in told:
            async with pool.box(told[name]) as box:
                found[name] = (await box.read("/etc/motd")).decode()
                if name == "image":
                    done = await box.run("cat /etc/motd; echo a > b; cat b; echo c > /etc/motd")
                    found["in image"] = [done.stdout, done.code]
    found["left"] = len(sleepers("4801"))
    return found
"""


def write_unloadable(root: Path) -> None:
    """An image that has a library loaded into every process, which ends with that: it needs one that is not there."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = Path(next(line.split()[-1] for line in maps if "/libm.so" in line)).read_bytes()
    assert b"libc.so.6\0" in library
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "etc" / "motd").write_text("bare\n")
    (root / "etc" / "ld.so.preload").write_text("/first.so\n")
    (root / "first.so").write_bytes(library.replace(b"libc.so.6\0", b"libx.so.6\0"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_is_used_as_ours_is(kind: str, place: Path) -> None:
    """Of the machine's programs, of an image without Python, and of one with no program at all."""
    images = place / f"images-{kind}"
    images.mkdir()
    told = {name: str(images / name) for name in ("image", "bare")}  # as `docker export` leaves them: without /work
    write_image(images / "image", ("sh", "cat"))
    for name in ("dev", "etc", "proc", "sys", "tmp"):
        (images / "image" / name).mkdir()
    (images / "image" / "etc" / "motd").write_text("of the image\n")
    write_unloadable(images / "bare")
    before = os.listdir(images / "image")
    found = done_by(kind, place, USED, told)
    assert sorted(os.listdir(images / "image")) == sorted(before)
    if kind == "crun":
        assert not any(place.glob("tmp/hpcrl-images-*/state/crun/*")), "a box's state is left"
    uid = user_of(kind).uid
    assert found["first"] == f"from outside/work\n{uid}\n" and found["second"] == "x\nruns\n"
    assert found["written"].count("Read-only file system") + found["written"].count("denied") == 4, found["written"]
    assert (found["spoken"], found["layered"], found["reset"], found["left"]) == ("spoken to", False, "", 0)
    assert found["bare"] == "bare\n"
    assert found["in image"] == ["of the image\na\n", 2]


@pytest.mark.parametrize("kind", KINDS)
def test_no_attempt_gets_anything(kind: str) -> None:
    """The attempts of `attacks.py`, of which most succeed where nothing is confined."""
    found = attack(BOX.replace("warm=0", f"warm=0, kind={kind!r}"), user_of(kind))
    assert len(found.got) == len(ATTEMPTS), found.said
    assert not [name for name, got in found.got.items() if got] and not found.damage


LIMITED = """
PYTHON = "/usr/bin/python3"
MANY = "import os, time\\nfor i in range(600): os.mkdir(f'd{i}')\\ntime.sleep(9)"
HOLD = "import time; x = b'x' * (400 << 20); time.sleep(9)"
COMMANDS = {
    "disk": "head -c 12M /dev/zero > a && head -c 12M /dev/zero > /tmp/b; sleep 9",
    "shared": "head -c 14M /dev/zero > a; head -c 14M /dev/zero > /dev/shm/b; sleep 9",
    "files": [PYTHON, "-c", MANY],
    "memory": [PYTHON, "-c", HOLD],
    "processes": "for i in $(seq 80); do sleep 4802 & done; wait",
    "time": "trap '' TERM INT; sleep 9",
}

async def main():
    found = {}
    async with SandboxPool(warm=0, limits=LIMITS, kind=kind) as pool, pool.box() as box:
        for name, command in COMMANDS.items():
            done = await box.run(command, 2.0 if name == "time" else 8.0)
            found[name] = [done.limit, done.timed_out, done.stderr]
            await box.reset()
        found["after"] = (await box.run("echo alive")).stdout
    found["left"] = len(sleepers("4802"))
    return found
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "crun", pytest.param("apptainer", marks=pytest.mark.soak)])
def test_limits_of_another_kind(kind: str, place: Path) -> None:
    """The keeper counts what no kernel bounds there, /dev/shm too, and ends what goes over."""
    found = done_by(kind, place, LIMITED)
    assert "16 MiB" in found["disk"][0] and "16 MiB" in found["shared"][0], found
    files = found["files"]  # crun's memory has a bound of its own
    assert "500 files" in files[0] or "No space left" in files[2], found
    assert "256 MiB" in found["memory"][0], found
    assert "48 processes" in found["processes"][0], found
    assert found["time"][1] and found["after"] == "alive\n" and found["left"] == 0


ENDED = """
async def main():
    found = {}
    async with SandboxPool(warm=0, limits=LIMITS, kind=kind) as pool:
        for which in ("first", "keeper", "spawner"):
            async with pool.box() as box:
                await box.run("(setsid sleep 4803 > /dev/null &)")
                asked = asyncio.create_task(box.run("sleep 4803"))
                await until(lambda: len(sleepers("4803")) == 2)
                all_of_it = family(pool._spawner.pid)
                pid = {"first": first_of(pool), "keeper": all_of_it[1], "spawner": all_of_it[0]}[which]
                os.kill(pid, signal.SIGKILL)
                try:
                    await asked
                    found[which] = "answered"
                except SandboxLost:
                    gone = lambda: not sleepers("4803") and not any(os.path.exists(f"/proc/{one}") for one in all_of_it[1:])
                    found[which] = "lost" if await until(gone) else f"left {sleepers('4803')}"
        async with pool.box() as box:
            found["after"] = (await box.run("echo alive")).stdout
            found["memory score"] = (await box.run("cat /proc/self/oom_score_adj")).stdout
    return found
"""


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ends_ends_the_box(kind: str, place: Path) -> None:
    """SIGKILL of its first process, its keeper, or the spawner: it is lost, and nothing of it is left."""
    found = done_by(kind, place, ENDED)
    assert found == {
        "first": "lost",
        "keeper": "lost",
        "spawner": "lost",
        "after": "alive\n",
        "memory score": "1000\n",
    }


def test_what_crun_is_told(tmp_path: Path) -> None:
    """What it has left of keepers that were killed is removed; an image that it cannot be told of is named."""
    from hpcrl.sandbox.kinds import crun

    for name in ("box-999999999-1", f"box-{os.getpid()}-1", ".cache"):
        (tmp_path / "state" / name).mkdir(parents=True)
    crun._tidy(str(tmp_path / "state"))
    assert sorted(os.listdir(tmp_path / "state")) == [".cache", f"box-{os.getpid()}-1"]
    (tmp_path / "image").mkdir()
    os.close(os.open(os.fsencode(tmp_path / "image") + b"/\xff", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(OSError, match=r"another encoding.* '.udcff' in "):
        crun._names(str(tmp_path / "image"))


def test_what_every_box_holds() -> None:
    """Boxes are forked from the spawner: it has imported neither what unpacks images nor the kinds that nobody uses."""
    text = "import hpcrl.sandbox.spawner, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    found = set(done.stdout.split())
    unwanted = {
        "tarfile",
        "subprocess",
        "tempfile",
        "compileall",
        "hpcrl.sandbox.kinds.choose",
    }
    assert "hpcrl.sandbox.keeper" in found and not found & unwanted


def test_kinds_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, or by the environment; one that there is not is an error that names those that there are."""
    assert kind_names()[0] == "namespaces" and set(KINDS) < set(kind_names())
    assert chosen(None) == "namespaces"
    monkeypatch.setenv(VARIABLE, "apptainer")
    assert (chosen(None), chosen("bubblewrap")) == ("apptainer", "bubblewrap")
    monkeypatch.setenv(VARIABLE, "docker")
    with pytest.raises(UsageError, match=VARIABLE):
        SandboxPool()
    with pytest.raises(UsageError, match="bubblewrap"):
        SandboxPool(kind="bublewrap")


def test_a_kind_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root is refused; a program that is not there is named."""
    if os.getuid() == 0:
        with pytest.raises(Unconfined, match="root"):
            prepare("bubblewrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(Unconfined, match="apptainer or singularity"):
            prepare("apptainer")
