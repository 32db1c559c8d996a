"""Boxes of each kind: they work alike, keep out the same, hold the same limits and end alike.

All is done by an ordinary user's process, for to root most kinds are refused.  Of Apptainer, which Debian 12 has not,
the argument list is looked at; with a newer release's it is run (`tests/support/other_kinds.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox import BoxLimits, SandboxPool
from hpcrl.sandbox.kinds import AUTO, PROGRAMS, VARIABLE, box_words, chosen, refuse_image
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

def parents():
    # each process -> its parent; one that has ended, and that init has not waited for yet, is none
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            found[int(name)] = int(parent)
    return found

def children(pid):
    return sorted(child for child, parent in parents().items() if parent == pid)

def family(pid):
    return [pid, *(one for child in children(pid) for one in family(child))]

def watcher_of(pool):
    return min(line.pid for line in pool._lines if line.pid and not line.lost)

def first_of(pool):
    found = []
    for pid in family(watcher_of(pool)):
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
                done = await box.run("cat /etc/motd; echo a > b; cat b; echo c > /etc/motd")
                found["in image"] = [done.stdout, done.code, box.layered]
    found["left"] = len(sleepers("4801"))
    return found
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_is_used_alike(kind: str, place: Path) -> None:
    """Of the machine's programs, and of an image without Python."""
    images = place / f"images-{kind}"
    images.mkdir()
    root = images / "image"  # as `docker export` leaves it: without /work
    write_image(root, ("sh", "cat"))
    for name in ("dev", "etc", "proc", "sys", "tmp"):
        (root / name).mkdir()
    (root / "etc" / "motd").write_text("of the image\n")
    user = user_of(kind)
    for path in (root, *root.rglob("*")):
        os.chown(path, user.uid, user.gid)
    before = os.listdir(root)
    found = done_by(kind, place, USED, {"image": str(root)})
    assert sorted(os.listdir(root)) == sorted(before)
    assert (root / "etc" / "motd").read_text() == "of the image\n"
    assert found["first"] == f"from outside/work\n{user.uid}\n" and found["second"] == "x\nruns\n"
    assert found["written"].count("Read-only file system") + found["written"].count("denied") == 4, found["written"]
    assert (found["spoken"], found["layered"], found["reset"], found["left"]) == ("spoken to", False, "", 0)
    layered = kind == "unshare"
    assert found["in image"] == ["of the image\na\n", 0 if layered else 2, layered]


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


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_each_kind(kind: str, place: Path) -> None:
    """The watcher counts what no kernel bounds there, /dev/shm too, and ends what goes over."""
    found = done_by(kind, place, LIMITED)
    for name in ("disk", "shared"):
        assert "16 MiB" in found[name][0] or "No space left" in found[name][2], found
    assert "500 files" in found["files"][0] or "No space left" in found["files"][2], found
    assert "256 MiB" in found["memory"][0], found
    assert "48 processes" in found["processes"][0] or "fork" in found["processes"][2], found
    assert found["time"][1] and found["after"] == "alive\n" and found["left"] == 0


ENDED = """
async def main():
    found = {}
    async with SandboxPool(warm=0, limits=LIMITS, kind=kind) as pool:
        for which in ("first", "program", "watcher"):
            async with pool.box() as box:
                await box.run("(setsid sleep 4803 > /dev/null &)")
                asked = asyncio.create_task(box.run("sleep 4803"))
                await until(lambda: len(sleepers("4803")) == 2)
                all_of_it = family(watcher_of(pool))
                pid = {"first": first_of(pool), "program": all_of_it[1], "watcher": all_of_it[0]}[which]
                os.kill(pid, signal.SIGKILL)
                try:
                    await asked
                    found[which] = "answered"
                except SandboxLost:
                    gone = lambda: not sleepers("4803") and parents().keys().isdisjoint(all_of_it)
                    found[which] = "lost" if await until(gone) else f"left {sleepers('4803')}"
        async with pool.box() as box:
            found["after"] = (await box.run("echo alive")).stdout
            found["memory score"] = (await box.run("cat /proc/self/oom_score_adj")).stdout
    return found
"""


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ends_ends_the_box(kind: str, place: Path) -> None:
    """SIGKILL of its first process, the program that has made it, or its watcher: it is lost, and nothing is left."""
    found = done_by(kind, place, ENDED)
    assert found == {
        "first": "lost",
        "program": "lost",
        "watcher": "lost",
        "after": "alive\n",
        "memory score": "1000\n",
    }


def test_kinds_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, or by the environment; one that there is not is an error that names those that there are."""
    assert chosen(None) == AUTO and set(KINDS) == set(PROGRAMS)
    monkeypatch.setenv(VARIABLE, "apptainer")
    assert (chosen(None), chosen("bwrap")) == ("apptainer", "bwrap")
    monkeypatch.setenv(VARIABLE, "docker")
    with pytest.raises(UsageError, match=VARIABLE):
        SandboxPool()
    with pytest.raises(UsageError, match="unshare, bwrap, apptainer"):
        SandboxPool(kind="bublewrap")


def test_a_kind_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root is refused; a program that is not there is named."""
    for name in ("bwrap", "apptainer"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("bwrap", "apptainer"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: 0)
            with pytest.raises(HpcrlError, match="root"):
                box_words(name, "system", BoxLimits())
    (tmp_path / "apptainer").unlink()
    with pytest.raises(HpcrlError, match="apptainer or singularity"):
        box_words("apptainer", "system", BoxLimits())


AUTOMATIC = """
async def main():
    os.environ["PATH"] = told
    async with SandboxPool(warm=0, limits=LIMITS) as pool, pool.box() as box:
        return [pool.kind, (await box.run("echo made")).stdout]
"""


def test_auto_takes_the_first_that_can(place: Path, tmp_path: Path) -> None:
    """A program that fails, as unshare does where users may make no namespaces, gives way to the next."""
    place.joinpath("bin").mkdir()
    (place / "bin" / "unshare").write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    (place / "bin" / "unshare").chmod(0o755)
    assert done_by("bwrap", place, AUTOMATIC, f"{place}/bin:/usr/bin:/bin") == ["bwrap", "made\n"]
    assert done_by("bwrap", place, AUTOMATIC, "/usr/bin:/bin") == ["unshare", "made\n"]


def test_what_apptainer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its documentation: nothing of the user's is mounted, all namespaces are the box's own, binds are read-only."""
    (tmp_path / "apptainer").touch(0o755)
    (tmp_path / "image.sif").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = box_words("apptainer", str(tmp_path / "image.sif"), BoxLimits())
    flags = "--contain --cleanenv --no-home --no-privs --no-eval --no-init --pid --ipc --uts"
    assert set(flags.split()) <= set(words)
    assert words[words.index("--network") + 1] == "none" and words[words.index("--scratch") + 1] == "/work"
    binds = [words[place + 1] for place, word in enumerate(words) if word == "--bind"]
    assert binds and all(bind.endswith(":ro") and ":/.hpcrl/" in bind for bind in binds)
    assert words[words.index("--pwd") + 2 :][:2] == [str(tmp_path / "image.sif"), "/.hpcrl/so/ld.so"]
    system = box_words("apptainer", "system", BoxLimits(), (("/given", "/srv"),))
    binds = [system[place + 1] for place, word in enumerate(system) if word == "--bind"]
    assert {"/usr:/usr:ro", "/srv:/given:ro"} <= set(binds)
    root = Path(system[system.index("--pwd") + 2])
    assert {"work", "tmp", "proc", "dev", ".hpcrl"} <= set(os.listdir(root)) and (root / "etc" / "passwd").is_file()
    with pytest.raises(UsageError, match="with one of"):
        box_words("apptainer", "system", BoxLimits(), (("/a:b", "/srv"),))


def test_images_that_are_none(tmp_path: Path) -> None:
    """A directory in which no command is found, one with a library for every program, and files but Apptainer's."""
    (tmp_path / "image.sif").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loads" / "bin").mkdir(parents=True)
    (tmp_path / "loads" / "etc").mkdir()
    (tmp_path / "loads" / "etc" / "ld.so.preload").touch()
    refuse_image(str(tmp_path / "image.sif"), "apptainer")
    for name, why in (("image.sif", "no directory"), ("empty", "bin and usr"), ("loads", "ld.so.preload")):
        with pytest.raises(UsageError, match=why):
            refuse_image(str(tmp_path / name), "unshare")
    for image in ("/", "relative", "/nowhere"):
        with pytest.raises(UsageError, match="no directory"):
            refuse_image(image, "bwrap")
