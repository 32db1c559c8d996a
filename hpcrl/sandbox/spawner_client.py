"""The spawner as the process that uses it holds it: it is started, asked for boxes, and gone with this object.

Invariant: each box that was asked for is ready, has raised an error, or is ended; of a spawner that has ended, every
box is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys

from hpcrl.errors import UsageError
from hpcrl.sandbox.box_line import BoxLine, SandboxLost
from hpcrl.sandbox.kinds.container_kind import ContainerKind
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.run import Unconfined, python_variables

_SEND = 10.0  #: seconds until the spawner has room for a message
_ENDING = 30.0  #: seconds that the end of a box may take
_PACKET = 1 << 16
_numbers = itertools.count(1)  #: of boxes of all spawners, so that none is taken for another's


class Spawner:
    """One process, and the boxes that it has forked.

    Attributes:
        pid: its process id.
        over: it has ended, or was told to.
    """

    def __init__(self) -> None:
        """Start it; to be called while an event loop runs.

        Raises:
            Unconfined: if this process may start none, as one that grades built-in rewards.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-P", "-m", "hpcrl.sandbox.spawner", str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    words,
                    env=python_variables(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise Unconfined(f"no sandbox can be made here: starting its spawner: {error.strerror}") from error
        self.pid = self._process.pid
        self.over = False
        self._lines: dict[int, BoxLine] = {}
        self._ends: dict[int, asyncio.Future[str]] = {}
        self._control.settimeout(_SEND)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control, self._hear)

    async def make(self, image: str, limits: BoxLimits, kind: ContainerKind | None = None) -> BoxLine:
        """A box that is ready.

        Args:
            kind: whose container it is to be in; None: one of this package's own namespaces.

        Raises:
            Unconfined: if this machine cannot make it.
            SandboxLost: if the spawner, or the box, has ended.
        """
        line = BoxLine(next(_numbers))
        wish = {"make": line.number, "image": image, "limits": vars(limits), "kind": kind}
        data = json.dumps(wish).encode()
        if len(data) > _PACKET:  # sent, it would end the spawner, and each of its boxes
            raise UsageError(f"what is asked of a sandbox takes {len(data):,} bytes", "give it fewer or shorter words")
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [data], [theirs.fileno()])
            except OSError as error:
                mine.close()
                self._end_all("its spawner has ended")
                raise SandboxLost(f"no sandbox was made: its spawner has ended ({error.strerror})") from error
        self._lines[line.number] = line
        try:
            await line.open(mine)
        except BaseException:
            self.begin_end(line)
            raise
        return line

    def begin_end(self, line: BoxLine) -> asyncio.Future[str]:
        """End a box: done when nothing of it is left, with the reason if it has ended before."""
        line.end("it was closed")
        future = self._ends.get(line.number)
        if future is None:
            future = self._ends[line.number] = self._loop.create_future()
            if self.over or line.number not in self._lines:
                self._ended(line.number, line.reason)
            else:
                with contextlib.suppress(OSError):
                    self._control.send(json.dumps({"end": line.number}).encode())
        return future

    async def reason(self, line: BoxLine) -> str:
        """Why a box has ended, as far as its keeper knows; nothing of it is left then.

        Raises:
            TimeoutError: if that takes half a minute.
        """
        return await asyncio.wait_for(asyncio.shield(self.begin_end(line)), _ENDING)

    def _hear(self) -> None:
        """Take what the spawner says of boxes that have ended."""
        try:
            data = self._control.recv(_PACKET)
            if data:
                said = json.loads(data)
                self._ended(said["ended"], said["why"])
        except (OSError, ValueError, KeyError):
            data = b""
        if not data:
            self._end_all("its spawner has ended")

    def _ended(self, number: int, why: str) -> None:
        line = self._lines.pop(number, None)
        if line:
            line.end(why or "it has ended")
            line.reason = why
        future = self._ends.pop(number, None)
        if future and not future.done():
            future.set_result(why)

    def _end_all(self, why: str) -> None:
        if not self.over:
            self.over = True
            self._loop.remove_reader(self._control)
            self._close_control()
        for number in list(self._lines):
            self._ended(number, why)
        for number in list(self._ends):
            self._ended(number, why)

    def _close_control(self) -> None:
        """Close the socket, for processes too that this one has forked and that have it as well."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def drop(self) -> None:
        """End the spawner and with it every box, after the end of the event loop that it was started in."""
        self.over = True
        self._close_control()
        self._process.poll()

    async def close(self) -> None:
        """End the spawner and with it every box; wait until it has ended.

        Raises:
            TimeoutExpired: if it has not within half a minute.
        """
        lines = list(self._lines.values())
        self._end_all("its spawner was closed")
        await asyncio.gather(*(line.ended() for line in lines))
        try:
            await asyncio.to_thread(self._process.wait, _ENDING)
        finally:
            self._process.kill()
