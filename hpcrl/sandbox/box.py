"""A box: a place for a model's commands, whose files and background processes stay from one to the next.

Invariant: a result is that of a command which ran to its end, or to a limit that the result names; where the box itself
is gone, `SandboxLost` is raised and there is no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from hpcrl.errors import UsageError
from hpcrl.sandbox import accounts
from hpcrl.sandbox.box_line import BoxLine, SandboxLost
from hpcrl.sandbox.inside.files import WORK
from hpcrl.sandbox.inside.frames import TRANSFER
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.watcher import LIMIT

_FILES = 30.0  #: seconds that a file's way in or out may take


class BoxResult(NamedTuple):
    """What became of a command.

    Attributes:
        code: its exit status, negative for a signal; as a shell's, 127 if there is no such program.
        stdout, stderr: the first bytes of what it wrote, as UTF-8; other bytes are replaced.
        stdout_cut, stderr_cut: it wrote more than `BoxLimits.output` bytes, which was thrown away.
        timed_out: it had not ended in time, and was ended.
        limit: the text of the other limit that ended it, or "".
    """

    code: int
    stdout: str
    stderr: str
    stdout_cut: bool = False
    stderr_cut: bool = False
    timed_out: bool = False
    limit: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit status 0."""
        return self.code == 0 and not self.timed_out


class ListedFile(NamedTuple):
    """An entry of a directory of a box.

    Attributes:
        kind: "file", "directory", "link" or "other".
        size: in bytes.
    """

    name: str
    kind: str
    size: int


class Box:
    """One sandbox, in use by one caller; `sandbox()` or `SandboxPool.box()` makes it and ends it.

    Several commands may run in it at once.

    Attributes:
        limits: what it may use.
    """

    def __init__(
        self,
        line: BoxLine,
        limits: BoxLimits,
        renew: Callable[[BoxLine], Awaitable[BoxLine]],
        reason: Callable[[BoxLine], Awaitable[str]],
    ) -> None:
        """Use a box that is ready.

        Args:
            renew: ends a box and hands out a new one like it.
            reason: why one has ended, as its watcher says.
        """
        self.limits = limits
        self._line = line
        self._renew = renew
        self._reason = reason

    @property
    def layered(self) -> bool:
        """Whether all of the image can be changed, for this box alone; else /work and /tmp can be written to, and of
        "system" the places that Harbor's tasks are written for."""
        return self._line.layered

    async def run(
        self,
        command: str | Sequence[str],
        seconds: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = WORK,
        stdin: bytes | str = b"",
    ) -> BoxResult:
        """Run a command, and wait for its end; processes that it leaves in the background stay.

        Args:
            command: a line for the shell (bash if there is one), or words, the first of which is sought in PATH.
            seconds: it is ended after these; `BoxLimits.seconds` unless given.
            env: variables in addition to HOME, LANG, PATH and TMPDIR.
            cwd: where it begins; relative to /work.
            stdin: what it can read.

        Raises:
            SandboxLost: if the box has ended meanwhile.
            UsageError: if the command is empty, or the time is no positive number.
        """
        began = time.monotonic()
        try:
            found = await self._run(command, seconds, env, cwd, stdin)
        except SandboxLost:
            accounts.ran(self, command, None, began)
            raise
        limits = accounts.causes_of(found.timed_out, found.stdout_cut or found.stderr_cut, found.limit)
        accounts.ran(self, command, found.code, began, limits)
        return found

    async def _run(
        self,
        command: str | Sequence[str],
        seconds: float | None,
        env: Mapping[str, str] | None,
        cwd: str,
        stdin: bytes | str,
    ) -> BoxResult:
        line = self._line
        seconds = self.limits.seconds if seconds is None else seconds
        body = stdin.encode() if isinstance(stdin, str) else stdin
        number, future = line.begin(body, **self._start(command, seconds, env, cwd), lasting=False)
        try:
            head, body = await line.finish(number, future, seconds)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxLost):
                line.begin(do="kill", id=number, signal=signal.SIGKILL)
            raise
        except SandboxLost:
            why = await self._reason(line)
            if not why.startswith(LIMIT):
                raise
            return BoxResult(-signal.SIGKILL, "", "", limit=f"{why.removeprefix(LIMIT)}; the sandbox was ended")
        out, err = head["sizes"]
        return BoxResult(
            head["code"],
            body[:out].decode(errors="replace"),
            body[out : out + err].decode(errors="replace"),
            *head["cut"],
            head["late"],
            head["limit"],
        )

    async def start(
        self,
        command: str | Sequence[str],
        seconds: float = 3600.0,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = WORK,
    ) -> BoxProcess:
        """Start a command that is written to and read while it runs: a shell, a debugger, a server.

        Its standard error is one with its standard output.  The arguments, and what is raised, are those of `run`; and

        Raises:
            BlockingIOError: if the box has as many processes as it may have.
        """
        line = self._line
        began = time.monotonic()
        number, future = line.begin(**self._start(command, seconds, env, cwd), lasting=True)
        await line.finish(number, future, 0.0)
        accounts.ran(self, command, None, began)
        return BoxProcess(line, number)

    def _start(
        self, command: str | Sequence[str], seconds: float, env: Mapping[str, str] | None, cwd: str
    ) -> dict[str, object]:
        if (
            not command
            or not all(command)
            or any("\0" in word for word in ([command] if isinstance(command, str) else command))
        ):
            raise UsageError(f"the command {command!r} of a sandbox", "give a line for the shell, or words")
        if not 0 < seconds < math.inf:
            raise UsageError(f"seconds={seconds!r} of a command in a sandbox", "give a positive number")
        return {
            "do": "run",
            "command": command if isinstance(command, str) else list(command),
            "seconds": seconds,
            "env": dict(env or {}),
            "cwd": cwd,
            "output": self.limits.output,
        }

    async def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a whole file inside, and the directories above it.

        Args:
            path: inside; relative to /work.
            data: 64 MiB at most.
            mode: its permissions, such as 0o755 for a program.

        Raises:
            OSError: as the kernel says of that path inside; ENOSPC where the box's disk is full.
            UsageError: if it is too large.
            SandboxLost: if the box has ended.
        """
        body = data.encode() if isinstance(data, str) else data
        if len(body) > TRANSFER:
            raise UsageError(f"{path}: {len(body):,} bytes", f"a sandbox takes {TRANSFER:,} in one file")
        await self._line.ask(_FILES, body, do="write", path=path, mode=mode)

    async def read(self, path: str, most: int = TRANSFER) -> bytes:
        """A whole regular file from inside; links are followed inside the box alone.

        Raises:
            OSError: as the kernel says; EINVAL of what is no regular file, EFBIG of one with more than `most` bytes.
            SandboxLost: if the box has ended.
        """
        return (await self._line.ask(_FILES, do="read", path=path, most=min(most, TRANSFER)))[1]

    async def listing(self, path: str = WORK) -> list[ListedFile]:
        """The entries of a directory inside, by name.

        Raises:
            OSError: as the kernel says; EFBIG of one with more than 10,000 entries.
            SandboxLost: if the box has ended.
        """
        _, body = await self._line.ask(_FILES, do="list", path=path)
        return [ListedFile(**entry) for entry in json.loads(body)]

    async def reset(self) -> None:
        """End every process of the box and forget every file that was written: it is as it was made.

        Raises:
            SandboxLost, Unconfined: if there can be no such box any more.
        """
        self._line = await self._renew(self._line)


class BoxProcess:
    """A command that runs in a box; what it has written waits here, `BoxLimits.output` bytes at most, to be read."""

    def __init__(self, line: BoxLine, number: int) -> None:
        self._line = line
        self._number = number

    async def read(self, seconds: float = 10.0) -> bytes:
        """What it has written since the last read; b"" when it has ended and all was read.

        Raises:
            TimeoutError: if it has written nothing after so many seconds.
            SandboxLost: if the box has ended.
        """
        head, body = await self._line.ask(seconds, do="take", id=self._number, patience=seconds)
        if not body and not head["ended"]:
            raise TimeoutError(f"nothing was written within {seconds:g} s")
        return body

    async def write(self, data: bytes | str, last: bool = False) -> None:
        """Hand bytes over to its standard input.

        Args:
            last: there are no more: its input ends after these.

        Raises:
            BrokenPipeError: if it reads no more.
            SandboxLost: if the box has ended.
        """
        body = data.encode() if isinstance(data, str) else data
        await self._line.ask(_FILES, body, do="feed", id=self._number, last=last)

    async def wait(self, seconds: float = 60.0) -> int:
        """Its exit status, negative for a signal; what it wrote can still be read.

        Raises:
            TimeoutError: if it has not ended after so many seconds.
            SandboxLost: if the box has ended.
        """
        number, future = self._line.begin(do="wait", id=self._number)
        try:
            return int((await asyncio.wait_for(future, seconds))[0]["code"])
        finally:
            self._line.forget(number)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it and what it has started.

        Raises:
            SandboxLost: if the box has ended.
        """
        await self._line.ask(_FILES, do="kill", id=self._number, signal=int(number))
