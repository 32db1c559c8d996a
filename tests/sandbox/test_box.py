"""Boxes: commands one after another and at once, long ones, files in and out, limits, images."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import UsageError
from hpcrl.sandbox import Box, BoxLimits, SandboxPool, Unconfined, kinds
from hpcrl.sandbox.inside.files import WORK
from hpcrl.sandbox.inside.first import ENDED, WAKE
from hpcrl.sandbox.watcher import POLL, Watch
from tests.support.able import needs
from tests.support.boxes import Loop

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
SMALL = BoxLimits(memory=128 << 20, processes=24, disk=8 << 20, inodes=200, output=4096, cpu=1, seconds=30.0)
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with Loop() as made:
        yield made


@pytest.fixture(scope="module")
def box(loop: Loop) -> Iterator[Box]:
    """One box for what leaves nothing that another test would see."""
    with loop.box() as made:
        yield made


@pytest.fixture(scope="module")
def small(loop: Loop) -> Iterator[Box]:
    """One with small limits, that every test resets."""
    with loop.box(limits=SMALL) as made:
        yield made


def test_commands_one_after_another(loop: Loop, box: Box) -> None:
    """Files stay between them; a line is the shell's, words are as they are; a code is the shell's."""
    go = loop.run
    assert go(box.run("echo one > file; pwd; echo $HOME")).stdout == "/work\n/work\n"
    done = go(box.run(["cat", "file", "not there"]))
    assert (done.stdout, done.code, done.ok) == ("one\n", 1, False) and "not there" in done.stderr
    assert go(box.run("cat; exit 7", stdin="text")) == (7, "text", "", False, False, False, "")
    assert go(box.run("echo $A; cat", env={"A": "x y"}, cwd="/tmp")).stdout == "x y\n"
    assert go(box.run(["no-such-program"]))[::2] == (127, "no-such-program: No such file or directory\n", False, "")
    assert go(box.run(["true"], cwd="/nowhere")).code == 127
    assert go(box.run(["/etc/passwd"])).code == 126
    assert go(box.run("kill -9 $$")).code == -9


def test_commands_at_once(loop: Loop, box: Box) -> None:
    """Each waits for what another writes: one at a time they would not end."""

    async def three() -> list[str]:
        lines = [f"echo > at-{n}; until [ -e at-{(n + 1) % 3} ]; do sleep 0.01; done; echo {n}" for n in range(3)]
        return [done.stdout for done in await asyncio.gather(*(box.run(line) for line in lines))]

    assert loop.run(three()) == ["0\n", "1\n", "2\n"]


#: waits at most ten seconds until no process sleeps for an hour: one that is killed is there for a moment still
NO_SLEEP = "for i in $(seq 200); do cat /proc/*/cmdline | tr '\\0' ' ' | grep -q 'sleep 47[1]' || exit 0; sleep 0.05; done; exit 1"


def test_time_is_bounded(loop: Loop, box: Box) -> None:
    """Of what ignores signals too, and what it has started in sessions of its own; the box stays."""
    done = loop.run(box.run("trap '' TERM INT HUP; echo a; setsid sleep 4711 & while :; do :; done", 2.0))
    assert done.timed_out and not done.ok and done.stdout == "a\n" and done.code == -9
    assert loop.run(box.run(NO_SLEEP)).ok


def test_what_is_cancelled_ends(loop: Loop, box: Box) -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(box.run("echo > begun; sleep 4712"))
        while (await box.run("test -e begun")).code:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return (await box.run(NO_SLEEP)).ok

    assert loop.run(cancelled())


def test_processes_in_the_background(loop: Loop) -> None:
    """They stay, hold no command's end up, and end with a reset, as files do."""
    with loop.box() as box:
        assert loop.run(box.run("(while :; do echo >> clock; sleep 0.01; done) & echo left > file")).ok
        assert loop.run(
            box.run(
                "a=$(wc -l < clock); until [ -s clock ] && [ $(wc -l < clock) -gt ${a:-0} ]; do sleep 0.01; done", 20.0
            )
        ).ok
        loop.run(box.reset())
        assert loop.run(box.run("ls /work /tmp; set /proc/[0-9]*; echo $#")).stdout.split()[-1] == "2"
        assert loop.run(box.listing()) == []


def test_a_long_process(loop: Loop, box: Box) -> None:
    """It is written to and read while it runs, waited for, and killed."""

    async def talk() -> None:
        shell = await box.start(["bash"])
        await shell.write("echo $((6 * 7)); echo wrong >&2\n")
        text = await shell.read()
        while b"wrong" not in text:
            text += await shell.read()
        assert text == b"42\nwrong\n"
        with pytest.raises(TimeoutError):
            await shell.read(0.05)
        with pytest.raises(TimeoutError):
            await shell.wait(0.05)
        await shell.write("echo end; exit 3\n", last=True)
        assert await shell.wait() == 3
        assert await shell.read() == b"end\n" and await shell.read() == b""
        with pytest.raises(BrokenPipeError):
            await shell.write("more")
        asleep = await box.start("sleep 4713 & sleep 4713")
        await asleep.kill()
        assert await asleep.wait() == -9
        late = await box.start("cat", seconds=0.1)
        assert await late.wait() == -9

    loop.run(talk())


def test_a_long_process_that_is_not_read(loop: Loop, small: Box) -> None:
    """It waits, and so does its output: all of it comes, however little of it is held."""

    async def count() -> int:
        loud = await small.start("head -c 1M /dev/zero; echo")
        size = 0
        while data := await loud.read():
            size += len(data)
            assert len(data) <= SMALL.output + (1 << 16)
        return size

    assert loop.run(count()) == (1 << 20) + 1


def test_files_in_and_out(loop: Loop, box: Box) -> None:
    go = loop.run
    data = bytes(range(256)) * 5000
    go(box.write("a/b/bytes", data))
    assert go(box.read(f"{WORK}/a/b/bytes")) == data
    go(box.write("a/b/bytes", "short"))
    assert go(box.run("wc -c < a/b/bytes; stat -c %a a/b/bytes")).stdout == "5\n644\n"
    go(box.write("a/run", "#!/bin/sh\necho ran\n", mode=0o755))
    assert go(box.run("a/run; ln -s run a/link; mkfifo a/pipe")).stdout == "ran\n"
    found = [(one.name, one.kind) for one in go(box.listing("a"))]
    assert found == [("b", "directory"), ("link", "link"), ("pipe", "other"), ("run", "file")]
    assert go(box.read("a/link")).endswith(b"ran\n")


def test_much_input(loop: Loop, box: Box) -> None:
    """All of what a command reads comes; a command that reads none of it ends all the same."""
    data = b"a line of some length\n" * 400_000
    assert loop.run(box.run("wc -c; sleep 0.1", stdin=data)).stdout == f"{len(data)}\n"
    assert loop.run(box.run("true", stdin=data)).ok


def test_a_directory_of_many_long_names(loop: Loop) -> None:
    """What a listing takes is bounded by the entries, however their names are written."""
    make = f"{PYTHON} -c \"for i in range(4000): open(b'%06d' % i + b'\\xff' * 249, 'w')\""
    with loop.box() as box:
        assert loop.run(box.run(make)).ok
        found = loop.run(box.listing())
        assert len(found) == 4000 and found[7].name.startswith("000007\udcff")
        assert loop.run(box.run(make.replace("range(4000)", "range(11000)"))).ok
        with pytest.raises(OSError, match="10,000"):
            loop.run(box.listing())
        assert loop.run(box.run("true")).ok


@pytest.mark.parametrize(
    ("ask", "number"),
    [
        (lambda box: box.read("nowhere"), errno.ENOENT),
        (lambda box: box.read("/tmp"), errno.EISDIR),
        (lambda box: box.read("/usr/bin/env", most=100), errno.EFBIG),
        (lambda box: box.write("/usr/x", b""), errno.EROFS),
        (lambda box: box.write("/tmp", b""), errno.EISDIR),
        (lambda box: box.write("large", bytes(9 << 20)), errno.ENOSPC),
        (lambda box: box.listing("/etc/passwd"), errno.ENOTDIR),
        (lambda box: box.read("a\0b"), errno.EINVAL),
        (lambda box: box.write("x" * 5000, b""), errno.ENAMETOOLONG),
    ],
)
def test_files_that_cannot_be(ask: Any, number: int, loop: Loop, small: Box) -> None:
    with pytest.raises(OSError, match=rf"Errno {number}\b") as error:
        loop.run(ask(small))
    assert error.value.errno == number and error.value.filename
    loop.run(small.reset())


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("f() { f | f & }; f; while :; do :; done", "24 processes"),
        (f"for i in 1 2 3; do {PYTHON} -c \"x = b'x' * (90 << 20); input()\" < <(sleep 60) & done; wait", "128 MiB"),
        (f"{PYTHON} -c \"x = b'x' * (400 << 20)\"", "128 MiB"),
        ("while :; do :; done", "1 s of processor"),
        ("head -c 20M /dev/zero > large", "8 MiB"),
        ("for i in $(seq 400); do : > /tmp/$i || exit 1; done", "files"),
    ],
    ids=["fork bomb", "memory of several", "memory of one", "processor", "disk", "inodes"],
)
def test_limits_of_a_box(command: str, limit: str, loop: Loop, small: Box) -> None:
    """The command is ended, or refused more; the result names the limit, and the box serves the next one."""
    done = loop.run(small.run(command))
    refused = "fork" in done.stderr and "process" in limit
    assert not done.ok and (limit in done.limit or refused), done
    assert loop.run(small.run("echo still here")).stdout == "still here\n"
    loop.run(small.reset())
    assert loop.run(small.run("head -c 7M /dev/zero > large")).ok


def test_what_a_command_held_is_not_the_nexts(loop: Loop) -> None:
    """What was over a limit takes time to end, the longer the more it held; a command that comes meanwhile waits for
    that, and is not ended for memory that another one's processes still held.
    """
    large = f"{PYTHON} -c \"x = b'x' * (400 << 20); input()\" < <(sleep 60) &"
    with loop.box(limits=BoxLimits(memory=1 << 30)) as box:
        for _ in range(6):
            done = loop.run(box.run(f"for i in 1 2 3; do {large} done; wait"))
            assert "1024 MiB" in done.limit, done
            assert loop.run(box.run("echo still here")).stdout == "still here\n"


def test_a_box_over_a_limit_is_told_once() -> None:
    """The watcher looks at nothing until all that ran has ended: what it saw would be held against the next command."""
    watcher, box = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, user = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    proc = os.open("/proc", os.O_RDONLY)
    limits = BoxLimits(memory=32 << 20, disk=16 << 20, processes=10_000)
    watch = Watch(limits, watcher, [lifeline.fileno()], proc, [])
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(watch.run()))
    box.settimeout(30.0)
    with watcher, box, lifeline:
        thread.start()
        box.send(WAKE)
        for _ in range(3):
            assert box.recv(200) == b"it took more than 32 MiB of memory"
            assert not select.select([box], [], [], 20 * POLL)[0]
            box.send(ENDED)
        user.close()
        thread.join(30.0)
    os.close(proc)
    assert ended == [""]


def test_the_disk_counts_as_memory(loop: Loop) -> None:
    """As it lies in memory, what is on it leaves less for processes."""
    limits = BoxLimits(memory=96 << 20, disk=80 << 20)
    with loop.box(limits=limits) as box:
        hold = f"{PYTHON} -c \"x = b'x' * (40 << 20); print(len(x))\""
        assert loop.run(box.run(hold)).ok
        assert loop.run(box.run("head -c 60M /dev/zero > large; sleep 0.2")).ok
        assert "96 MiB" in loop.run(box.run(hold.replace("print(len(x))", "import time; time.sleep(9)"))).limit


def test_output_is_bounded(loop: Loop, small: Box) -> None:
    done = loop.run(small.run("yes & yes >&2 & sleep 2; kill %1 %2", 20.0))
    assert (len(done.stdout), done.stdout_cut, len(done.stderr), done.stderr_cut) == (4096, True, 4096, True)
    done = loop.run(small.run("head -c 4096 /dev/zero; echo >&2"))
    assert (len(done.stdout), done.stdout_cut, done.stderr_cut) == (4096, False, False)


@pytest.mark.parametrize(
    "given",
    [{"memory": 1}, {"processes": 0}, {"seconds": 0.0}, {"disk": 2 << 30}, {"output": 1 << 30}, {"files": "x"}],
)
def test_limits_that_cannot_hold(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        BoxLimits(**given)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda box: box.run(""), "''"),
        (lambda box: box.run([]), r"\[\]"),
        (lambda box: box.run("a\0b"), "command"),
        (lambda box: box.run("true", 0.0), "seconds=0.0"),
        (lambda box: box.write("x", bytes((64 << 20) + 1)), "67,108,865"),
        (lambda box: box.run("x" * (5 << 20)), "sandbox"),
    ],
)
def test_questions_that_are_refused(ask: Any, named: str, loop: Loop, box: Box) -> None:
    with pytest.raises(UsageError, match=named):
        loop.run(ask(box))


# ---- images


PROGRAMS = ("sh", "cat", "ls", "rm", "mkdir", "mv")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small root file system, where some of what a box needs is something else."""
    root = tmp_path_factory.mktemp("image, a:b")
    for name in ("bin", "etc", "data/deep"):
        (root / name).mkdir(parents=True)
    for name in PROGRAMS:
        source = Path(shutil.which(name) or "").resolve()
        shutil.copy(source, root / "bin" / name)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, timeout=60, check=True).stdout
        for word in listed.split():
            if word.startswith("/"):
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    (root / "etc" / "motd").write_text("of the image\n")
    (root / "data" / "deep" / "file").write_text("deep\n")
    (root / "tmp").symlink_to("/etc")
    (root / "proc").write_text("no directory")
    return root


def written(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in (root / "etc", root / "data")
        for path in path.rglob("*")
        if path.is_file()
    }


def test_an_image_and_its_layer(image: Path, loop: Loop) -> None:
    """All of it can be changed inside, nothing of it outside; a reset has it as it was."""
    before = written(image)
    with loop.box(str(image)) as box:
        assert box.layered
        change = "echo mine > /etc/motd; rm -r /data/deep; mv /bin/mv /bin/moved; mkdir /new; cat /etc/motd; ls /data"
        assert loop.run(box.run(change)).stdout == "mine\n"
        assert loop.run(box.run("ls /new /bin/moved /tmp; cat /proc/self/stat > /dev/null")).code == 0
        assert written(image) == before and not (image / "new").exists()
        loop.run(box.reset())
        assert loop.run(box.run("cat /etc/motd /data/deep/file; ls /new")).stdout == "of the image\ndeep\n"
        assert loop.run(box.run("ls /usr/bin/python3")).code


def test_an_image_that_is_not_there(loop: Loop, tmp_path: Path) -> None:
    for name in ("relative", str(tmp_path / "none"), "/etc/passwd"):
        with pytest.raises(UsageError, match=name), loop.box(name):
            pass


IMPORTED = "from hpcrl.sandbox.inside.main import main;"
#: a call of the first process's fails as the kernel says it
FAILS = (
    IMPORTED + " from hpcrl.sandbox.inside import kernel; import ctypes;"
    " kernel.libc.{call} = lambda *_: [ctypes.set_errno(1), -1][1];"
)
#: a step of its own does
REFUSES = (
    IMPORTED + " from hpcrl.sandbox.inside import main as found; from unittest import mock;"
    " found.{name} = mock.Mock(side_effect=OSError(1, 'refused by the test'));"
)


def changed(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Have the argument list say something else."""
    before = kinds.box_words

    def words(*given: Any) -> list[str]:
        found = before(*given)
        assert any(old in word for word in found)
        return [word.replace(old, new) for word in found]

    monkeypatch.setattr("hpcrl.sandbox.box_line.box_words", words)


def test_no_overlay(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where users may mount none the image is read-only, and the box says so."""
    changed(monkeypatch, "mount -t overlay", "mount -t no-such-overlay")
    with Loop() as loop, loop.box(str(image)) as box:
        assert not box.layered
        done = loop.run(box.run("cat /etc/motd; echo a > ~/b; echo c > /tmp/d; cat ~/b /tmp/d; echo > /etc/x"))
        assert done.stdout == "of the image\na\nc\n" and done.code


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--user", "--no-such-namespace", "unrecognized option"),
        ("mount -t proc", "mount -t no-such-proc", "mount: .*denied|unknown filesystem"),
        ("pivot_root . ", "echo refused by the test >&2; exit 1; ", "refused by the test"),
        ("--pid", "--uts", "ermission denied|not permitted"),
        (IMPORTED, FAILS.format(call="prctl"), "ending with the process .*: .*not permitted"),
        (IMPORTED, FAILS.format(call="umount2"), "leaving the root before: .*not permitted.*docs/security.md"),
        (IMPORTED, FAILS.format(call="unshare"), "making a user namespace: .*not permitted.*docs/security.md"),
        (IMPORTED, FAILS.format(call="capset"), "dropping capabilities: .*not permitted"),
        (IMPORTED, REFUSES.format(name="seccomp.refuse_calls"), "refused by the test"),
        (IMPORTED, REFUSES.format(name="_disks"), "refused by the test"),
    ],
)
def test_no_box_is_half_confined(old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any part fails there is one error that says which, and whoever asks again is told again."""
    changed(monkeypatch, old, new)

    async def ask() -> None:
        async with SandboxPool(warm=1, kind="unshare") as pool:
            for _ in range(2):
                with pytest.raises(Unconfined, match=said):
                    async with pool.box():
                        pass
            assert pool.counts().made == 0

    run_alone(ask())


def run_alone(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))
