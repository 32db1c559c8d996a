"""One box as its user holds it: questions and answers over a stream, whatever order they come in.

Invariant: each question is answered, raises what the box could not do, or raises `SandboxLost`, within its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from typing import Any, Protocol

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox.frames import IncomingMessages, Message, pack
from hpcrl.sandbox.run import Unconfined
from hpcrl.sandbox.usage import START
from hpcrl.utils.deadline import Deadline

GRACE = 15.0  #: seconds that an answer may take beyond what was asked for
_HINT = "make what it was for again, in another box"


class SandboxLost(HpcrlError):
    """The box is gone while it was in use, and what ran in it: nothing is known of how that would have ended.

    An event like the loss of a node: whatever needed the box is done again, and is never graded.
    """


class BytesWriter(Protocol):
    """What a `BoxLine` writes to: an `asyncio.StreamWriter`, or what leads to another machine."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class BoxLine:
    """The user's end of a box.

    Attributes:
        number: the box's, at its spawner.
        lost: why it is of no use any more; "" while it is.
        reason: what its keeper said of that.
        layered: all of its image can be changed, for this box alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lost = ""
        self.reason = ""
        self.layered = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._writer: BytesWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, end: socket.socket) -> None:
        """Wait until the box says that it is ready.

        Raises:
            Unconfined: if this machine cannot make it.
            SandboxLost: if it has ended before that.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        ready = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(reader))
        head, _ = await self._answer(0, ready, Deadline(START + GRACE))
        if "refused" in head:
            self.end("it could not be made")
            raise Unconfined(f"no sandbox can be made here: {head['refused']}")
        self.layered = head["layered"]

    def connect(self, reader: asyncio.StreamReader, writer: BytesWriter, layered: bool) -> None:
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
            raise SandboxLost(f"the sandbox was lost: {self.lost or 'it was never ready'}", _HINT)
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
            raise SandboxLost(f"the sandbox was lost: {self.lost}", _HINT) from None
        finally:
            self._waiting.pop(number, None)
        if "errno" in head:
            raise OSError(int(head["errno"]), str(head["text"]), str(head["path"]))
        return head, body

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each answer to its question, until the stream ends."""
        frames = IncomingMessages()
        why = "it has ended, or its spawner has"
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
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(f"the sandbox was lost: {self.lost}", _HINT))
                future.exception()  # it may be that nothing waits for it any more
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the stream with it
            if self._writer:
                self._writer.close()
            if self._task and self._task is not asyncio.current_task():
                self._task.cancel()

    async def ended(self) -> None:
        """Wait until nothing is read any more, after `end`."""
        if self._task:
            await asyncio.wait([self._task], timeout=GRACE)
