"""A second account of this machine, from which tests attack what runs under the first.

The account is made once, has no password, no home and no group of anyone else's, and stays: several test processes may
use it at once.  Its programs are texts for the system's Python, with the standard library alone: the tests' own
environment is not readable for it.

Invariant: what the account can do is what any stranger on a node can do, no more.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NAME = "hpcrl-stranger"
PYTHON = "/usr/bin/python3"
SECONDS = 60.0


@dataclass
class SecondUser:
    """The account, and the processes that were started as it."""

    uid: int
    gid: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python program, with pipes for its input and output."""
        command = [PYTHON, "-I", "-c", program, *arguments]
        made = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            start_new_session=True,
        )
        self.started.append(made)
        return made

    def run(self, program: str, *arguments: str, timeout: float = SECONDS) -> str:
        """What a Python program says.

        Raises:
            TimeoutExpired: after `timeout` seconds.
        """
        made = self.start(program, *arguments)
        try:
            return made.communicate(timeout=timeout)[0]
        finally:
            made.kill()

    def end(self) -> None:
        """End what was started and still runs."""
        for process in self.started:
            process.kill()
            process.wait(SECONDS)


@pytest.fixture
def second_user() -> Iterator[SecondUser]:
    """An unprivileged account, and nothing of it left running."""
    user = make_user()
    yield user
    user.end()


def make_user() -> SecondUser:
    """The account, made if it is not there; skips the test where this cannot be."""
    if os.geteuid() != 0:
        pytest.skip("a second account can be made by root alone")
    if not shutil.which("useradd") or not Path(PYTHON).exists():
        pytest.skip(f"a second account needs useradd and {PYTHON}")
    if (found := _account()) is None:
        command = [
            "useradd",
            "--system",
            "--no-create-home",
            "--home-dir",
            "/nonexistent",
            "--shell",
            "/bin/false",
            NAME,
        ]
        made = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        found = _account()  # another test may have made it meanwhile
        if found is None:
            pytest.skip(f"no second account could be made: {made.stderr.strip()}")
    return SecondUser(found.pw_uid, found.pw_gid)


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(NAME)
    except KeyError:
        return None
