"""One box as its user holds it: a process that watches it, and questions and answers over a stream, in any order.

Invariant: each question is answered, raises what the box could not do, or raises `SandboxLost`, within its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox.inside.frames import IncomingMessages, Message, pack
from hpcrl.sandbox.inside.main import START
from hpcrl.sandbox.kinds import Shown, box_words
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.utils.waiting import Deadline

GRACE = 15.0  #: seconds that an answer may take beyond what was asked for
_ENDING = 30.0  #: seconds that the end of a box may take
_USED_UP = tuple(map(os.strerror, (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)))
_FORBIDDEN = tuple(map(os.strerror, (errno.EPERM, errno.EACCES, errno.ENOSPC)))
NO_NAMESPACES = (
    "; users may make no namespaces here (Ubuntu 24.04: AppArmor; Docker: seccomp; elsewhere "
    "user.max_user_namespaces): docs/security.md, What a site can do"
)
_WATCHER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hpcrl.sandbox.watcher import main; main(sys.argv[1:])"
REPEAT = "repeat the work in another box"


class Unconfined(HpcrlError):
    """No box can be made here, so nothing was run."""


class SandboxLost(HpcrlError):
    """The box is gone while it was in use, and what ran in it: nothing is known of how that would have ended.

    An event like the loss of a node: whatever needed the box is done again, and is never graded.
    """


class BoxLine:
    """The user's end of a box.

    Attributes:
        pid: of the process that watches it; 0: it is of another machine.
        lost: why it is of no use any more; "" while it is.
        layered: all of its image can be changed, for this box alone.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.lost = ""
        self.layered = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._writer: Any = None  # an `asyncio.StreamWriter`, or what leads to another machine
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._closing: asyncio.Task[str] | None = None

    async def make(self, kind: str, image: str, limits: BoxLimits, shown: Shown = ()) -> None:
        """Make the box, and wait until it says that it is ready.

        Raises:
            Unconfined: if this machine cannot make it.
            SandboxLost: if it has ended before that.
        """
        try:
            words = await asyncio.to_thread(box_words, kind, image, limits, shown)
            end = self._start(words, limits)
        except UsageError:
            raise
        except HpcrlError as error:
            raise Unconfined(f"no sandbox can be made here: {error}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxLost(f"no sandbox was made: {error}") from error
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        ready = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(reader))
        head, _ = await self._answer(0, ready, Deadline(START + GRACE))
        self.layered = head.get("layered", False)
        if said := head.get("refused") or head.get("said"):
            self.end("it could not be made")
            if any(text in said for text in _USED_UP):
                raise SandboxLost(f"no sandbox was made: {said}")
            why = NO_NAMESPACES if any(text in said for text in _FORBIDDEN) else ""
            raise Unconfined(f"no sandbox can be made here: {kind}: {said}{why}")

    def _start(self, words: list[str], limits: BoxLimits) -> socket.socket:
        """Start what makes the box and watches it; this end of the stream."""
        mine, talk = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline.setblocking(False)
        files = (lifeline.fileno(), talk.fileno())
        told = json.dumps({"words": words, "limits": vars(limits)})
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-ISBc", _WATCHER, root, *map(str, files), str(os.getpid()), told]
        with talk, lifeline:
            try:
                self._process = subprocess.Popen(
                    command,
                    env={},
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                mine.close()
                self._lifeline.close()
                raise
        self.pid = self._process.pid
        return mine

    def close(self) -> asyncio.Task[str]:
        """End the box: done when nothing of it is left, with the reason if it has ended by itself."""
        self.end("it was closed")
        self._closing = self._closing or asyncio.get_running_loop().create_task(self._closed())
        return self._closing

    async def _closed(self) -> str:
        if self._task:
            await asyncio.wait([self._task], timeout=GRACE)
        if not self._process or not self._lifeline:
            return ""
        said = b""
        with contextlib.suppress(OSError):  # it was killed, or takes too long
            heard = asyncio.get_running_loop().sock_recv(self._lifeline, 1 << 12)
            said = await asyncio.wait_for(heard, _ENDING)
        self._lifeline.close()
        await asyncio.to_thread(self._process.wait, _ENDING)
        return said.decode(errors="replace")

    def connect(self, reader: asyncio.StreamReader, writer: Any, layered: bool) -> None:
        """Use a box that is ready, and that these lead to."""
        self._writer = writer
        self.layered = layered
        self._task = asyncio.create_task(self._read(reader))

    async def ask(self, seconds: float, body: bytes = b"", **head: Any) -> Message:
        """The answer to one question.

        Args:
            seconds: that it may take in the box.

        Raises:
            OSError: what the box's kernel has answered, with the path inside.
            UsageError: if the question is too large.
            SandboxLost: if the box has ended, or gives no answer.
        """
        number, future = self.begin(body, **head)
        return await self._answer(number, future, Deadline(seconds + GRACE))

    def begin(self, body: bytes = b"", **head: Any) -> tuple[int, asyncio.Future[Message]]:
        """Send a question: its number, and the answer to come.

        Raises:
            UsageError: if it is too large.
            SandboxLost: if the box has ended.
        """
        if self.lost or self._writer is None:
            raise SandboxLost(f"the sandbox was lost: {self.lost or 'it was never ready'}", REPEAT)
        number = next(self._numbers)
        try:
            data = pack(head | {"n": number}, body)
        except ValueError as error:
            raise UsageError(f"a sandbox takes no such question: {error}") from error
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(data)
        return number, future

    async def finish(self, number: int, future: asyncio.Future[Message], seconds: float) -> Message:
        """As `ask`, of a question that was sent."""
        return await self._answer(number, future, Deadline(seconds + GRACE))

    def forget(self, number: int) -> None:
        """Wait for that question's answer no more."""
        self._waiting.pop(number, None)

    async def _answer(self, number: int, future: asyncio.Future[Message], deadline: Deadline) -> Message:
        try:
            head, body = await asyncio.wait_for(future, deadline.left)
        except TimeoutError:
            self.end(f"it gave no answer within {deadline.seconds:g} s")
            raise SandboxLost(f"the sandbox was lost: {self.lost}", REPEAT) from None
        finally:
            self._waiting.pop(number, None)
        if "errno" in head:
            raise OSError(int(head["errno"]), str(head["text"]), str(head["path"]))
        return head, body

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each answer to its question, until the stream ends."""
        frames = IncomingMessages()
        why = "it has ended, or its watcher has"
        try:
            while data := await reader.read(1 << 18):
                for head, body in frames.feed(data):
                    if "broken" in head:
                        why = str(head["broken"])
                    future = self._waiting.get(head["n"])
                    if future and not future.done():
                        future.set_result((head, body))
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"what it says cannot be read: {error!r}"
        finally:
            self.end(why)

    def end(self, why: str) -> None:
        """Close the stream, which ends the box; whatever waits for an answer raises `SandboxLost`."""
        self.lost = self.lost or why
        if self._lifeline and self._lifeline.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_WR)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(f"the sandbox was lost: {self.lost}", REPEAT))
                future.exception()  # it may be that nothing waits for it any more
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the stream with it
            if self._writer:
                self._writer.close()
            if self._task and self._task is not asyncio.current_task():
                self._task.cancel()
