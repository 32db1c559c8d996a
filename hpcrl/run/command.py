"""A short command that is asked something: what it answered, within a deadline.

Invariants: whatever a command does is an answer, never an exception: a program that is missing, fails or is too slow
included; nothing that it started outlives a question that was given up.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import NamedTuple

#: exit codes, as timeout(1) and a shell have them
LATE = 124
MISSING = 127


class CommandResult(NamedTuple):
    """What a command answered.

    code: its exit status, negative for a signal; LATE if it did not end in time, MISSING if it could not be started.
    out, err: what it wrote; in those two cases `err` says what happened.
    """

    code: int
    out: str = ""
    err: str = ""
    program: str = ""

    @property
    def said(self) -> str:
        """The last line that says something, of the errors or else of the output, without the program's name before
        it."""
        lines = [line.strip() for text in (self.out, self.err) for line in text.splitlines() if line.strip()]
        return lines[-1].removeprefix(f"{self.program}: ") if lines else f"exit code {self.code}"


def ask(command: Sequence[str], seconds: float, stdin: str = "", env: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command for at most `seconds`.  env: all of its environment; None: ours."""
    program = Path(command[0]).name
    try:
        process = Popen(
            command,
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return CommandResult(MISSING, "", f"cannot be started: {error.strerror}", program)
    with process:
        try:
            out, err = process.communicate(stdin or None, timeout=seconds)
        except TimeoutExpired:
            _end(process)
            return CommandResult(LATE, "", f"no answer within {seconds:.0f} s", program)
        except BaseException:
            _end(process)
            raise
    return CommandResult(process.returncode, out, err, program)


def _end(process: Popen[str]) -> None:
    """Kill a command with all of its session's first group; it has not been waited for, so the number is still its
    own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
