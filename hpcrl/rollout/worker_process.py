"""A process that runs the user's own code, seen from the rollout process: rewards, and functions that make samples.

Invariant: it is ended with everything it started, by process group, and never waited for without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

import msgspec

_LENGTH = struct.Struct("<Q")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket: MessagePack with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame.  asyncio.IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


class WorkerProcess:
    """`python -m MODULE FD`, with a socket to it.  gone: whether it has ended."""

    def __init__(self, module: str, setup: msgspec.Struct, env: dict[str, str] | None = None) -> None:
        """setup: the first frame that it is sent; env: what its environment has besides ours."""
        self._setup = setup
        self.gone = False
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | (env or {}),
                process_group=0,
            )
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self) -> bytes:
        """Send the setup; the body of the answer.  ConnectionError if it ends before."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=1 << 22)
        self._writer.write(frame(self._setup))
        return await self.receive()

    async def receive(self) -> bytes:
        """The body of the next frame.  ConnectionError when the process has ended."""
        try:
            return await receive(self._reader)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error

    def write(self, message: msgspec.Struct) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    def kill(self) -> None:
        """End it and what it started, at once.  `reaped` says when it is gone."""
        self.gone = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()

    def reaped(self) -> bool:
        return self._process.poll() is not None

    async def ended(self) -> str:
        """How it ended by itself; what it has left behind is ended too."""
        self.gone = True
        for _ in range(50):
            if self.reaped():
                break
            await asyncio.sleep(0.01)  # its socket closes a little before it is gone
        self.kill()
        status: Any = self._process.poll()
        if status is None:
            return "it closed its socket"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
