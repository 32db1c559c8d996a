"""Commands that are confined: their limits, what comes back of them, and what is said where they cannot be."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hpcrl.sandbox import private_root, seccomp
from hpcrl.sandbox.main import MEMORY, NUMBERS, PROCESSES, threads_of_user
from hpcrl.sandbox.private_root import TMP, View
from hpcrl.sandbox.run import OUTPUT, Confined, Unconfined, run_confined
from tests.support.able import needs

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
PYTHON = "/usr/bin/python3"
#: the kernel is told something, and refuses: what Ubuntu's AppArmor does once the namespace is there
WRITES = """
import os
before = os.write
def write(number, data):
    if data.endswith(b"{end}"):
        raise PermissionError(1, "refused by the test")
    return before(number, data)
os.write = write
"""


def run(text: str, view: View | None = None, seconds: float = 60.0) -> Confined:
    """What bash makes of a text, confined."""
    words = ["/bin/bash", "-c", text]
    return run_confined(words, view or View(), {"PATH": "/usr/bin:/bin"}, seconds)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("f() { f | f & }; f; while :; do :; done", "processes"),
        (f"for i in 1 2 3 4 5; do {PYTHON} -c \"x = b'x' * (800 << 20); input()\" < <(sleep 60) & done; wait", "MiB"),
        ("for i in $(seq 300); do sleep 60 & done; wait", "processes"),
    ],
    ids=["fork bomb", "memory of several", "many processes"],
)
def test_limits_that_end_it(text: str, limit: str) -> None:
    """All of it is ended, and nothing of it is left."""
    before = len(os.listdir("/proc"))
    done = run(text)
    assert limit in done.limit or "fork" in done.err, done
    assert str(PROCESSES) in done.limit or str(MEMORY >> 20) in done.limit or "fork" in done.err
    assert len(os.listdir("/proc")) < before + PROCESSES


@needs("root")
@pytest.mark.skipif(
    tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) < (6, 14),
    reason="one pid_max for the whole machine",
)
def test_roots_processes_are_bounded_too() -> None:
    """A fork bomb of root's had thousands of processes before it was ended, and no other could start one."""
    outside = Path("/proc/sys/kernel/pid_max").read_text()
    assert run("cat /proc/sys/kernel/pid_max").out == f"{NUMBERS}\n"
    assert Path("/proc/sys/kernel/pid_max").read_text() == outside


@pytest.mark.parametrize(
    "text",
    [
        f"{PYTHON} -c \"x = b'x' * (2 << 30)\"",
        f"{PYTHON} -c \"files = [open('/dev/null') for _ in range(300)]\"",
        "head -c 20M /dev/zero > /tmp/large",
        "for i in $(seq 70); do head -c 1M /dev/zero > /tmp/$i || exit 1; done",
        "for i in $(seq 20000); do : > /tmp/$i || exit 1; done",
        "head -c 1M /dev/zero > /results/../usr/x",
    ],
    ids=["memory of one", "open files", "a large file", "a full disk", "many files", "another disk"],
)
def test_limits_that_refuse(text: str) -> None:
    assert run(text).code != 0


def test_output_is_bounded() -> None:
    done = run("cat /dev/zero")
    assert len(done.out) <= OUTPUT and done.code


def test_it_holds_no_file_from_outside() -> None:
    """Its input is what it could open itself, its output lies in memory of its own, and nothing else is open."""
    text = (
        "import os, stat, json, sys; mode = lambda: stat.S_IMODE(os.stat('/dev/null').st_mode)\n"
        "try:\n    os.chmod('/proc/self/fd/0', mode())\nexcept OSError as error:\n    print(error.errno)\n"
        "print(json.dumps([os.fstat(number).st_dev for number in (1, 2)] + os.listdir('/proc/self/fd')))\n"
        "sys.stderr.write('also')"
    )
    done = run_confined([PYTHON, "-I", "-c", text], View(), {}, 60.0)
    refused, rest = done.out.splitlines()
    out, err, *numbers = json.loads(rest)
    assert int(refused) == errno.EROFS and done.err == "also"
    outside = {os.stat(path).st_dev for path in ("/", "/dev/null", "/dev/shm", tempfile.gettempdir())}
    assert out == err and out not in outside
    assert set(numbers) <= {"0", "1", "2", "3"}  # 3 lists the others


def test_threads_of_a_user_are_counted(tmp_path: Path) -> None:
    """The limit of processes is one of threads, and on older kernels those of other programs count."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, args=[60]) for _ in range(40)]
    for thread in threads:
        thread.start()
    shown = Path("/proc/self/status").read_text()
    ended.set()
    for thread in threads:
        thread.join(60)
    other = shown.replace(f"Uid:\t{os.getuid()}\t", f"Uid:\t{os.getuid() + 1}\t")
    for name, text in (("7", shown), ("8", other), ("self", shown)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status").write_text(text)
    (tmp_path / "9").mkdir()
    assert 41 <= threads_of_user(str(tmp_path)) < 80


def test_time_is_bounded() -> None:
    """Also of what ignores signals and has left its session."""
    began = time.monotonic()
    done = run("trap '' TERM HUP INT; setsid sleep 500 & while :; do :; done", seconds=1.0)
    assert done.late and time.monotonic() - began < 30


def test_results_come_back(tmp_path: Path) -> None:
    """Regular files alone: no link is followed, what waits is not waited for, and holes do not fill a disk."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    results = tmp_path / "results"
    results.mkdir()
    text = (
        f"cd /results; echo one > one; ln -s {secret} two; mkfifo three; mkdir four; ln -s /etc/passwd five; "
        "for i in $(seq 20); do truncate -s 15M six$i; done"
    )
    done = run(text, View((), str(results)))
    assert done.code == 0, done
    found = {path.name: path.stat().st_size for path in results.iterdir()}
    assert found.pop("one") == 4 and all(name.startswith("six") for name in found)
    assert sum(found.values()) <= TMP and not any(path.is_symlink() for path in results.iterdir())


def test_what_is_shown_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "file").write_text("text")
    view = View((("/given/here", str(tmp_path / "a b")), ("/given/alone", str(tmp_path / "a b" / "file"))))
    done = run("cat /given/here/file /given/alone; ls /given; ls /home /run; touch /given/here/x", view)
    assert done.out.split() == ["texttextalone", "here", "/home:", "/run:"] and "ead-only" in done.err


def test_kernels_without_mount_setattr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.12 each mount is made read-only by itself, those below it too."""
    file = tmp_path / "file"
    file.write_text("text")
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import hpcrl.sandbox.system_calls as calls\ncalls._SYS_MOUNT_SETATTR = 9999\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{hook}:{os.environ.get('PYTHONPATH', '')}")
    done = run(
        "touch /usr/x; chmod 777 /given; cat /given; mount | grep -v '(ro' | cut -d' ' -f3",
        View((("/given", str(file)),)),
    )
    assert done.out.startswith("text") and set(done.out[4:].split()) <= {"/tmp"}, done
    assert done.err.count("ead-only") == 2


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("confine.unshare = refuse", "refused by the test.*AppArmor.*docs/security.md"),
        (WRITES.format(end="deny"), "/proc/self/setgroups: .*AppArmor"),
        (WRITES.format(end=" 1"), "/proc/self/uid_map: .*AppArmor"),
        ("confine.drop_capabilities = refuse", "refused by the test"),
        ("private_root.pivot_root = refuse", "refused by the test"),
        ("seccomp.check = refuse", "refused by the test"),
        ("seccomp.supported = lambda: False", "system calls of"),
    ],
)
def test_nothing_runs_half_confined(broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where any part fails there is one error, and the command has not begun."""
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "from hpcrl.sandbox import confine, private_root, seccomp\n"
        f"def refuse(*_):\n    raise OSError(1, 'refused by the test')\n{broken}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(Unconfined, match=f"cannot be confined here: .*{said}"):
        run("echo > /results/began", View((), str(results)))
    assert not list(results.iterdir())


def test_users_who_may_make_no_namespaces() -> None:
    """The kernel's own refusal names the step and who may have forbidden it."""
    program = (
        "from tests.sandbox.test_run import *\ntry:\n    run('true')\nexcept Unconfined as error:\n    print(error)\n"
    )
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    words = ["unshare", "--user", "--map-root-user", "/bin/sh", "-c", inner, sys.executable, program]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert re.search("making namespaces: .*AppArmor.*docs/security.md", done.stdout), done


def test_a_command_that_cannot_be_started() -> None:
    """It is named, and namespaces have nothing to do with it."""
    for command, why in (("/nowhere/program", "No such file"), ("/etc/passwd", "ermission denied")):
        with pytest.raises(Unconfined, match=f"{command}: .*{why}") as error:
            run_confined([command], View(), {}, 20.0)
        assert "AppArmor" not in str(error.value)


def test_system_directories() -> None:
    assert private_root.in_system("/bin/sh") and not private_root.in_system("/tmp") and seccomp.supported()
