"""A second account of this machine, from which tests attack what runs under the first.

The account is made once, has no password, no home and no group of anyone else's, and stays: several test processes may
use it at once.  Its programs are texts for the system's Python, with the standard library alone: the tests' own
environment is not readable for it.

Invariant: what the account can do is what any stranger on a node can do, no more.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.able import PYTHON, find_account, require

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
    require("account")
    found = find_account()
    assert found is not None
    return SecondUser(found.pw_uid, found.pw_gid)
