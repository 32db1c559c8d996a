"""A terminal: commands run on a pty of a given size, and what its screen then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: a control sequence, or one character
_PIECE = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|(\x1b.)|(.)", re.DOTALL)


def run_on_terminal(
    argv: Sequence[str], columns: int, cwd: Path, env: Mapping[str, str], rows: int = 24, seconds: float = 60.0
) -> tuple[int, str]:
    """(exit status, everything that a command has written to its terminal)."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", **env}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, cwd=cwd, env=env)
    os.close(its)
    data = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            data += chunk
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    return process.wait(seconds), data.decode()


def ctrl_c(
    argv: Sequence[str], when: Sequence[str], cwd: Path, env: Mapping[str, str], seconds: float = 180.0
) -> tuple[int, str]:
    """(exit status, what was written): a command in the foreground of a terminal of its own, at which Ctrl-C is pressed
    each time that the next of `when` has been written, wherever it stands."""
    pid, ours = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a shell has it at a terminal; the tests may run behind nohup
        os.chdir(cwd)
        os.execve(argv[0], list(argv), {**os.environ, "TERM": "xterm", **env})
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    data, awaited, end = b"", list(when), time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                data += os.read(ours, 1 << 16)
            if awaited and awaited[0].encode() in data:
                awaited.pop(0)
                os.write(ours, b"\x03")
    except OSError:  # EIO: the other end is closed
        pass
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(ours)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), data.decode(errors="replace")


def screen(text: str, columns: int) -> list[str]:
    """The lines that a terminal shows after `text`, none of which is wrapped: a line that is too long fails.

    It knows what rich needs: colours, show and hide the cursor, up, clear a line; anything else fails.
    """
    lines = [""]
    row = 0
    column = 0
    for given, command, other, character in _PIECE.findall(text):
        if command == "A":
            row -= int(given or 1)
        elif command == "K":
            assert given == "2"
            lines[row] = ""
        elif command:
            assert command == "m" or given == "?25", (given, command)
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            assert not other and character.isprintable(), (other, character)
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
            assert column <= columns, lines[row]
    return [line.rstrip() for line in lines]
