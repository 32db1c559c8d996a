"""What is tried from inside a box against its own watcher, against other boxes and against who reads files out of it.

What a hostile program tries against the user's account is in `test_attacks.py`, which does it in boxes as well."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.sandbox import Box, BoxLimits
from tests.support.able import needs
from tests.support.boxes import Loop, all_of, watchers

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
LIMITS = BoxLimits(memory=256 << 20, processes=48, disk=16 << 20, inodes=500, output=1 << 16, seconds=30.0)
PYTHON = "/usr/bin/python3"
#: no program may say that it had what it wanted
GOT = "GOT-IT"


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """Its boxes begin while this process has a secret in its environment."""
    os.environ["HPCRL_TEST_SECRET"] = "secret-of-the-run"
    try:
        with Loop() as made, made.box():
            yield made
    finally:
        del os.environ["HPCRL_TEST_SECRET"]


@pytest.fixture
def box(loop: Loop) -> Iterator[Box]:
    with loop.box(limits=LIMITS) as made:
        yield made


ATTACKS = {
    "signals to its first process": "for s in KILL TERM INT STOP CHLD HUP USR1 SEGV ABRT; do kill -$s 1; done; sleep 0.1",
    "signals to all": "kill -KILL -1",
    "signals to outside": "kill -0 {watcher} && echo GOT-IT; kill -0 {test} && echo GOT-IT",
    "memory of its first process": "cat /proc/1/mem /proc/1/environ /proc/1/maps && echo GOT-IT; : > /proc/1/mem && echo GOT-IT",
    "files of its first process": "ls /proc/1/fd/ /proc/1/root/ /proc/1/cwd/ && echo GOT-IT",
    "tracing its first process": f"{PYTHON} -c \"import ctypes; r = ctypes.CDLL(None).ptrace(16, 1, 0, 0); print('GOT-IT' if r == 0 else r)\"",
    "limits of its first process": f"{PYTHON} -c \"import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (5, 5)); print('GOT-IT')\"",
    "raised limits": "ulimit -u 100000 && echo GOT-IT; ulimit -v unlimited && echo GOT-IT; ulimit -f unlimited && echo GOT-IT",
    "secrets of the run": "cat /proc/*/environ | grep -a secret-of && echo GOT-IT; env | grep -i secret && echo GOT-IT",
    "a larger disk": "mount -o remount,size=1G /tmp && echo GOT-IT; mount -t tmpfs x /tmp && echo GOT-IT",
    "the image": "echo x > /usr/bin/x && echo GOT-IT; chmod 777 /usr && echo GOT-IT; echo x >> /etc/passwd && echo GOT-IT",
    "namespaces": "unshare --user --map-root-user true && echo GOT-IT; nsenter -t 1 -a true && echo GOT-IT",
    "devices": "mknod /tmp/disk b 8 0 && echo GOT-IT; cat /dev/mem /dev/kmsg && echo GOT-IT; ls /dev/pts && echo GOT-IT",
    "a terminal": "(: < /dev/tty) && echo GOT-IT; (: > /dev/console) && echo GOT-IT",
    "a program of another user": "cp /bin/sh /tmp/s; chmod u+s /tmp/s; grep -q 'NoNewPrivs:.1' /proc/self/status || echo GOT-IT",
    "capabilities": "grep -E 'Cap(Prm|Eff|Bnd|Amb)' /proc/self/status | grep -qv 0000000000000000 && echo GOT-IT",
    "the network": f"{PYTHON} -c \"import socket; socket.socket(); print('GOT-IT')\"; grep -q : /proc/net/dev && grep -qv lo: /proc/net/dev && ls /sys/class/net && echo GOT-IT",
    "abstract sockets": f"{PYTHON} -c \"import socket; socket.socket(socket.AF_UNIX); print('GOT-IT')\"",
    "endless output": "timeout 1 yes; timeout 1 yes >&2; true",
    "many pipes left open": "for i in $(seq 40); do sleep 4721 & done; true",
    "deep directories": f"{PYTHON} -c \"import os\nfor i in range(600): os.mkdir('d'); os.chdir('d')\"",
    "a fork bomb that hides": "f() {{ setsid sh -c ':' & f & f; }}; f > /dev/null 2>&1 & sleep 1; true",
    "holes": "truncate -s 15M a b c d; cp --sparse=never a e && cp --sparse=never a f && echo GOT-IT",
}


#: after these its disk is full, which it is until a reset
FULL = ("deep directories", "holes")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_from_inside(name: str, loop: Loop, box: Box) -> None:
    """It gets nothing, and the box serves its user as before, or is itself again after a reset."""
    command = ATTACKS[name].replace("{{", "{").replace("}}", "}")
    command = command.replace("{watcher}", str(watchers(loop.pool)[0])).replace("{test}", str(os.getpid()))
    done = loop.run(box.run(command, 20.0))
    assert GOT not in done.stdout + done.stderr, done
    assert len(done.stdout) <= LIMITS.output and not done.timed_out, done
    if name in FULL:
        with pytest.raises(OSError, match="after"):
            loop.run(box.write("after", "as before"))
        loop.run(box.reset())
    loop.run(box.write("after", "as before"))
    assert loop.run(box.read("after")) == b"as before"
    again = loop.run(box.run("echo alive"))
    if again.stdout != "alive\n":  # what is left of a bomb goes over the limit, and takes this command with it
        assert "bomb" in name and "processes" in again.limit, again
        loop.run(box.reset())
        assert loop.run(box.run("echo alive")).stdout == "alive\n"
    until(lambda: all(os.path.exists(f"/proc/{pid}") for pid in watchers(loop.pool)))  # but of one that is being closed


def test_what_an_ignored_signal_keeps(loop: Loop, box: Box) -> None:
    """Neither a time limit nor a reset asks politely."""
    stubborn = "trap '' TERM INT HUP QUIT; while :; do sleep 0.05; done"
    assert loop.run(box.run(stubborn, 0.3)).timed_out
    loop.run(box.run(f'(setsid bash -c "{stubborn}" hpcrl-stubborn-4722 > /dev/null 2>&1 &)'))
    until(lambda: "hpcrl-stubborn-4722" in command_lines())
    loop.run(box.reset())
    until(lambda: "hpcrl-stubborn-4722" not in command_lines())
    assert "4722" not in loop.run(box.run("cat /proc/*/cmdline")).stdout


def test_another_box(loop: Loop, box: Box) -> None:
    """Its files, processes, and the memory that processes share are not there."""
    with loop.box(limits=LIMITS) as other:
        loop.run(other.run("echo hidden > mine; echo hidden > /dev/shm/mine; (sleep 4723 > /dev/null &)"))
        found = loop.run(box.run("cat ./* /tmp/* /dev/shm/*; cat /proc/*/cmdline; ls /proc/*/root$HOME")).stdout
        assert "hidden" not in found and "4723" not in found and "mine" not in found
        loop.run(box.run("kill -9 -1"))
        assert "4723" in loop.run(other.run("cat /proc/*/cmdline")).stdout


def test_ways_out_through_files(loop: Loop, box: Box, tmp_path: Path) -> None:
    """Links lead nowhere but to what the box itself has; what would wait or has no end is refused."""
    secret = tmp_path / "secret"
    secret.write_text("secret-of-the-run")
    link = f"ln -s {secret} one; ln -s /proc/1/root{secret} two; ln -s ../../../../..{secret} three; "
    loop.run(
        box.run(link + "ln -s /proc/self/environ four; ln -s /proc/1/fd/3 five; mkfifo six; ln -s /dev/zero seven")
    )
    loop.run(box.run(f"ln -s {tmp_path} folder; ln -s nine nine; ln -s /proc/self/mem ten"))
    for name in ("one", "two", "three", "four", "five", "six", "seven", "folder/secret", "nine", "ten"):
        with pytest.raises(OSError, match=name):
            loop.run(box.read(name))
        if name not in ("one", "two", "three", "folder/secret"):  # there these make directories, or fail, inside
            with pytest.raises(OSError, match=name):
                loop.run(box.write(name, "x"))
    loop.run(box.run("rm -r folder; mkdir -p target; ln -s target folder"))
    loop.run(box.write("folder/file", "inside"))
    assert loop.run(box.run("cat target/file")).stdout == "inside"
    assert secret.read_text() == "secret-of-the-run" and list(tmp_path.iterdir()) == [secret]


def test_background_processes_that_keep_outputs_open(loop: Loop, box: Box) -> None:
    """A process that opens the outputs of every command holds few of the first process's files."""
    keep = (
        "import glob, os, time\nheld = {}\nwhile True:\n    for path in glob.glob('/proc/*/fd/[12]'):\n"
        "        try:\n            name = os.readlink(path)\n            if 'pipe' in name and name not in held:\n"
        "                held[name] = os.open(path, os.O_WRONLY)\n        except OSError:\n            pass\n"
        "    open('/tmp/new', 'w').write(str(len(held)))\n    os.rename('/tmp/new', '/tmp/held')\n    time.sleep(0.005)\n"
    )
    loop.run(box.write("keep.py", keep))
    loop.run(box.run(f"({PYTHON} keep.py > /dev/null 2>&1 &); until [ -s /tmp/held ]; do sleep 0.01; done"))

    async def many() -> None:
        for _ in range(9):
            await asyncio.gather(*(box.run("echo x; sleep 0.3") for _ in range(12)))

    loop.run(many())
    mine = all_of(loop.pool)
    found = psutil.process_iter(["cmdline"])  # one of a command may end meanwhile
    first = next(p.pid for p in found if p.pid in mine and "keep.py" in (p.info["cmdline"] or ()))
    parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    assert int(loop.run(box.read("/tmp/held"))) > 130
    said = Path(f"/proc/{parent}/status").read_text()  # which any user may read, unlike the list of its files
    assert int(re.search(r"FDSize:\t(\d+)", said)[1]) <= 128, "the first process has kept files of ended commands"


#: what a command does -> what must not be in what it prints
HELD = {
    "leases": "import fcntl; fcntl.fcntl(open('/usr/bin/env'), 1024, 1); print('GOT-IT')",
    "files without a name": "import os; os.memfd_create('x'); print('GOT-IT')",
    "memory of System V": "import ctypes; print('GOT-IT' if ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0 else '')",
    "semaphores of System V": "import ctypes; print('GOT-IT' if ctypes.CDLL(None).semget(0, 9, 0o1600) >= 0 else '')",
    "messages of System V": "import ctypes; print('GOT-IT' if ctypes.CDLL(None).msgget(0, 0o1600) >= 0 else '')",
    "watches": "import ctypes; print('GOT-IT' if ctypes.CDLL(None).inotify_init() >= 0 else '')",
}


@pytest.mark.parametrize("name", HELD)
def test_what_no_limit_counts_is_refused(name: str, loop: Loop, box: Box) -> None:
    """Memory that is in no process, and what holds up others of the machine."""
    done = loop.run(box.run([PYTHON, "-c", HELD[name]]))
    assert GOT not in done.stdout, done


def test_a_command_has_its_own_files_alone(loop: Loop, box: Box) -> None:
    """Above all not the stream on which its box answers."""
    text = "import os; print([n for n in range(3, 4096) if not os.system(f'test -e /proc/{os.getpid()}/fd/{n}')])"
    assert loop.run(box.run([PYTHON, "-c", text.replace("4096", "16")])).stdout.strip() == "[]"
    forged = "import os\nfor n in range(3, 64):\n    try: os.write(n, b'x'); print('GOT-IT')\n    except OSError: pass"
    assert GOT not in loop.run(box.run([PYTHON, "-c", forged])).stdout


def test_memory_behind_an_ended_thread_counts(loop: Loop, box: Box) -> None:
    """The first thread ends; what the second one holds is the process's still."""
    text = (
        "import ctypes, threading, time\n"
        "def hold():\n    kept = [bytearray(16 << 20) for _ in range(40)]\n    time.sleep(20)\n"
        "threading.Thread(target=hold).start(); time.sleep(0.2); ctypes.CDLL(None).syscall(60, 0)"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit is x86_64's")
    assert "MiB of memory" in loop.run(box.run([PYTHON, "-c", text])).limit


def test_no_link_leads_files_out_of_the_box(loop: Loop, box: Box) -> None:
    loop.run(box.run("ln -s /proc/self/exe program; ln -s /proc/self/fd folders"))
    for path in ("program", "folders/3"):
        with pytest.raises(OSError, match="Too many levels|links|Errno"):
            loop.run(box.read(path))
        with pytest.raises(OSError, match="Too many levels|links|Errno"):
            loop.run(box.write(path, b""))
    with pytest.raises(OSError, match="Too many levels|links|Errno"):
        loop.run(box.listing("folders/3"))


def test_no_question_ends_the_box(loop: Loop, box: Box) -> None:
    """Deep paths, and a /tmp that a command has put away."""
    with pytest.raises(OSError, match="No space left"):
        loop.run(box.write("d/" * 1100 + "f", b"deep"))
    loop.run(box.reset())
    loop.run(box.run("rm -rf /tmp /work; ln -s /proc /tmp; false"))
    done = loop.run(box.run("exit 3", cwd="/"))
    assert (done.code, done.limit) == (3, "")


def command_lines() -> str:
    """What every process of this machine was started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def until(done: object, seconds: float = 30.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)
