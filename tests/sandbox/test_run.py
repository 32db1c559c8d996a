"""Commands that are confined: their limits, what comes back of them, and what is said where they cannot be."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.sandbox.kinds import in_system
from hpcrl.sandbox.run import LIMITS, MOST, OUTPUT, RESULTS, Confined, run_confined
from tests.support.able import needs

pytestmark = [pytest.mark.process, needs("namespaces", "python")]
PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[2]


def run(text: str, *shown: tuple[str, str], seconds: float = 60.0, results: str = "") -> Confined:
    """What bash makes of a text, confined."""
    return run_confined(["/bin/bash", "-c", text], {"PATH": "/usr/bin:/bin"}, seconds, shown, results=results)


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
    assert str(LIMITS.processes) in done.limit or str(LIMITS.memory >> 20) in done.limit or "fork" in done.err
    assert len(os.listdir("/proc")) < before + LIMITS.processes


@pytest.mark.parametrize(
    "text",
    [
        f"{PYTHON} -c \"x = b'x' * (7 << 30)\"",
        f"{PYTHON} -c \"files = [open('/dev/null') for _ in range(300)]\"",
        "head -c 65M /dev/zero > /tmp/large",
        "for i in $(seq 70); do head -c 1M /dev/zero > /tmp/$i || exit 1; done",
        "for i in $(seq 20000); do : > /tmp/$i || exit 1; done",
        f"head -c 1M /dev/zero > {RESULTS}/../../usr/x",
    ],
    ids=["memory of one", "open files", "a large file", "a full disk", "many files", "another disk"],
)
def test_limits_that_refuse(text: str) -> None:
    assert run(text).code != 0


def test_output_is_bounded() -> None:
    done = run("cat /dev/zero", seconds=3.0)
    assert len(done.out) <= OUTPUT and done.code


def test_it_holds_no_file_from_outside() -> None:
    """Its input is a device that it cannot change, its outputs are pipes, and nothing else is open."""
    text = (
        "import os, stat, json, sys; mode = lambda: stat.S_IMODE(os.stat('/dev/null').st_mode)\n"
        "try:\n    os.chmod('/proc/self/fd/0', mode())\nexcept OSError as error:\n    print(error.errno)\n"
        "print(json.dumps([stat.S_ISFIFO(os.fstat(number).st_mode) for number in (1, 2)] + os.listdir('/proc/self/fd')))\n"
        "sys.stderr.write('also')"
    )
    done = run_confined([PYTHON, "-I", "-c", text], {}, 60.0)
    refused, rest = done.out.splitlines()
    out, err, *numbers = json.loads(rest)
    assert int(refused) == errno.EROFS and done.err == "also"
    assert out and err
    assert set(numbers) <= {"0", "1", "2", "3"}  # 3 lists the others


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
        f"cd {RESULTS}; echo one > one; ln -s {secret} two; mkfifo three; mkdir four; ln -s /etc/passwd five; "
        "for i in $(seq 20); do truncate -s 15M six$i; done"
    )
    done = run(text, results=str(results))
    assert done.code == 0, done
    found = {path.name: path.stat().st_size for path in results.iterdir()}
    assert found.pop("one") == 4 and all(name.startswith("six") for name in found)
    assert sum(found.values()) <= MOST and not any(path.is_symlink() for path in results.iterdir())


def test_what_is_shown_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "file").write_text("text")
    shown = (("/given/here", str(tmp_path / "a b")), ("/given/alone", str(tmp_path / "a b" / "file")))
    done = run("cat /given/here/file /given/alone; ls /given; ls /home /run; touch /given/here/x", *shown)
    assert done.out.split() == ["texttextalone", "here", "/home:", "/run:"] and "ead-only" in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can mount something below what is shown")
def test_what_is_mounted_below_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(tmp_path / "below")]
    program = f"from tests.sandbox.test_run import *; print(run('ls /given; touch /given/below/x', ('/given', {str(tmp_path)!r})))"
    words = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f"{shlex.join(mount)}; exec {shlex.join([sys.executable, '-c', program])}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert "below" in done.stdout and "ead-only" in done.stdout, done


def test_users_who_may_make_no_namespaces() -> None:
    """The kernel's own refusal names the step and who may have forbidden it."""
    program = "from tests.sandbox.test_run import *\nfrom hpcrl.sandbox import Unconfined\ntry:\n    run('true')\nexcept Unconfined as error:\n    print(error)\n"
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    words = ["unshare", "--user", "--map-root-user", "/bin/sh", "-c", inner, sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert re.search("unshare failed: .*AppArmor.*docs/security.md.*bwrap.*apptainer", done.stdout), done


def test_a_command_that_cannot_be_started() -> None:
    """It is named, as by a shell."""
    for command, code, why in (("/nowhere/program", 127, "No such file"), ("/etc/passwd", 126, "ermission denied")):
        done = run_confined([command], {}, 20.0)
        assert done.code == code and re.search(f"{command}: .*{why}", done.err), done


def test_system_directories() -> None:
    assert in_system("/bin/sh") and not in_system("/tmp")
