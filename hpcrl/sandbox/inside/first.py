"""What a box's first process does once it is confined: it starts what the box's user asks for, and adopts what is left.

It cannot be traced or signalled by its commands, and does nothing that waits: each question is a message of `frames.py`
with a number, and its answer has the same.

Invariant: with this process ends everything in the box; and it ends when its user's end of the stream, or its watcher,
is gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

from hpcrl.sandbox.inside import frames
from hpcrl.sandbox.inside.commands import Running
from hpcrl.sandbox.inside.files import list_files, read_file, write_file
from hpcrl.sandbox.inside.frames import IncomingMessages, Message
from hpcrl.utils.waiting import Deadline

ENVIRONMENT = {
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TMPDIR": "/tmp",
}
WAKE = b"w"  #: told to the watcher when something was started, which it sees then
ENDED = b"e"  #: told to the watcher when all that ran over a limit has ended, and what it held is free
_UNSENT = 2 * frames.TRANSFER  #: bytes of answers; with more no question is read
_AT_ONCE = 256  #: ended processes that are waited for before anything else is looked at
_LEFT = 64  #: outputs of commands that have ended, and that something in the background still has open
_PATH = 4096  #: characters of a path that an error names
_FULL = "it has as many processes as it may have"


class NoRoom(BaseException):
    """What is lacking is the machine's and not the box's: the box is lost, and no command is to blame."""


class BoxInit:
    """Serves one box until its user, or its watcher, is gone."""

    def __init__(
        self,
        talk: socket.socket,
        watcher: socket.socket,
        limits: dict[int, int],
        disk: int,
    ) -> None:
        """Serve what comes through `talk`.

        Args:
            watcher: says which limit all processes together are over.
            limits: of each process, `resource.RLIMIT_*`.
            disk: number of an open directory of the box's disk.
        """
        self._disk = disk
        self._talk = talk
        self._watcher = watcher
        self._limits = limits
        self._reader = IncomingMessages()
        self._unsent = bytearray()
        self._running: dict[int, Running] = {}
        self._takes: dict[int, tuple[int, Deadline]] = {}  #: command -> (question, until when it waits)
        self._waits: list[tuple[int, int]] = []  #: (question, command)
        self._left: list[Any] = []  #: outputs that processes in the background still have open
        self._more_ended = False
        self._ending = False  #: what was over a limit has not ended yet; nothing is started meanwhile
        self._children, waking = os.pipe()
        for number in (self._children, waking):
            os.set_blocking(number, False)
        for end in (talk, watcher):
            end.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler is one that processes inside could reach
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Answer until the stream is closed."""
        while True:
            ready = self._poll()
            if ready.get(self._watcher.fileno()) and not self._hear_watcher():
                return
            if ready.get(self._talk.fileno()) and not self._ending and not self._hear_user():
                return
            for output in list(self._outputs()):
                if output.number in ready:
                    output.look()
            for running in self._running.values():
                if running.input in ready:
                    running.push()
            with contextlib.suppress(BlockingIOError):
                os.read(self._children, 1 << 10)
            self._reap()
            self._answer_what_is_due()
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                while self._unsent:
                    del self._unsent[: self._talk.send(self._unsent[: 1 << 18])]

    def _poll(self) -> dict[int, int]:
        """What can be read or written, within the time of the next deadline."""
        poll = select.poll()
        poll.register(self._watcher, select.POLLIN)
        poll.register(self._children, select.POLLIN)
        reads = select.POLLIN if len(self._unsent) < _UNSENT and not self._ending else 0
        poll.register(self._talk, reads | (select.POLLOUT if self._unsent else 0))
        for output in self._outputs():
            if output.wanted:
                poll.register(output.number, select.POLLIN)
        for running in self._running.values():
            if running.hungry:
                poll.register(running.input, select.POLLOUT)
        times = [running.deadline.left for running in self._running.values() if running.runs]
        times += [deadline.left for _, deadline in self._takes.values()]
        shortest = 0.0 if self._more_ended else min(times, default=None)
        return dict(poll.poll(None if shortest is None else min(shortest, 3600.0) * 1000 + 1))

    def _outputs(self) -> Iterator[Any]:
        for running in self._running.values():
            yield from running.outputs
        yield from self._left

    def _hear_watcher(self) -> bool:
        """End all that runs, for the reason that the watcher gives; False when it is gone."""
        words = self._watcher.recv(1 << 12)
        if not words:
            return False
        self._ending = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        for running in self._running.values():
            if running.code is None:
                running.limit = words.decode()
        return True

    def _hear_user(self) -> bool:
        """Read questions; False when the user is gone."""
        try:
            data = self._talk.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for head, body in self._reader.feed(data):
            self._do((head, body))
        return bool(data)

    def _do(self, message: Message) -> None:
        head, body = message
        try:
            answer = getattr(self, f"_do_{head['do']}")(head, body)
        except OSError as error:
            path = os.fsdecode(error.filename or head.get("path", ""))
            answer = {"errno": error.errno, "text": error.strerror, "path": path[:_PATH]}
        except Exception as error:  # noqa: BLE001  (such as a path that no kernel takes: no question ends the box)
            answer = {"errno": errno.EINVAL, "text": str(error), "path": str(head.get("path", ""))[:_PATH]}
        if answer is not None:
            self._answer(head["n"], answer)

    def _answer(self, question: int, head: dict[str, Any], body: bytes = b"") -> None:
        self._unsent += frames.pack(head | {"n": question}, body)

    # ---- questions; what returns None is answered later

    def _do_run(self, head: dict[str, Any], body: bytes) -> dict[str, Any] | None:
        lasting = head["lasting"]
        try:
            running = Running(
                head["command"],
                ENVIRONMENT | head["env"],
                head["cwd"],
                self._limits,
                head["output"],
                head["seconds"],
                lasting,
                body,
                self._disk,
            )
        except BlockingIOError as error:
            if not self._crowded():
                raise NoRoom(f"the machine has no room for another process: {error.strerror}") from error
            if lasting:
                raise
            return {"code": 126, "sizes": [0, 0], "cut": [False, False], "late": False, "limit": _FULL}
        with contextlib.suppress(OSError):  # it has not looked for long; or it is gone, as is seen next
            self._watcher.send(WAKE)
        self._running[head["n"]] = running
        return {} if lasting else None

    def _crowded(self) -> bool:
        """Whether the box itself has as many processes as it may, nearly."""
        return 2 * sum(name.isdigit() for name in os.listdir("/proc")) > self._limits.get(
            resource.RLIMIT_NPROC, 1 << 30
        )

    def _do_take(self, head: dict[str, Any], body: bytes) -> None:
        if head["id"] in self._takes:
            raise OSError(errno.EBUSY, "another read of it waits", "")
        self._takes[head["id"]] = (head["n"], Deadline(head["patience"]))

    def _do_feed(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        running = self._running.get(head["id"])
        if running is None or running.input < 0:
            raise BrokenPipeError(errno.EPIPE, "its input is closed", "")
        running.feed(body, head["last"])
        return {}

    def _do_wait(self, head: dict[str, Any], body: bytes) -> None:
        self._waits.append((head["n"], head["id"]))

    def _do_kill(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        if running := self._running.get(head["id"]):
            running.kill(head["signal"])
        return {}

    def _do_write(self, head: dict[str, Any], body: bytes) -> dict[str, Any]:
        write_file(head["path"], body, head["mode"])
        return {}

    def _do_read(self, head: dict[str, Any], body: bytes) -> None:
        self._answer(head["n"], {}, read_file(head["path"], head["most"]))

    def _do_list(self, head: dict[str, Any], body: bytes) -> None:
        self._answer(head["n"], {}, json.dumps(list_files(head["path"])).encode())

    # ---- what has ended

    def _reap(self) -> None:
        """Wait for every child that has ended: commands, and what was left to this process."""
        by_pid = {running.pid: running for running in self._running.values() if running.code is None}
        self._more_ended = False
        try:
            for _ in range(_AT_ONCE):
                pid, status, used = os.wait3(os.WNOHANG)
                if not pid:
                    return
                if pid in by_pid:
                    by_pid[pid].ended(status, used)
            self._more_ended = True
        except ChildProcessError:
            if self._ending:
                self._all_ended()

    def _all_ended(self) -> None:
        """Tell the watcher, which may look again: what it saw before is no fault of a command that comes now."""
        try:
            self._watcher.send(ENDED)
            self._ending = False
        except BlockingIOError:
            self._more_ended = True  # it has not read for long: once more

    def _answer_what_is_due(self) -> None:
        self._left = [output for output in self._left if output.number >= 0]
        while len(self._left) > _LEFT:
            self._left.pop(0).close()
        for number, running in list(self._running.items()):
            if running.runs and running.deadline.over:
                running.run_out()
            if number in self._takes:
                self._hand_over(number, running)
            if running.code is not None and not running.lasting:
                del self._running[number]
                self._answer(number, *self._end_of(running))
        for question, number in list(self._waits):
            running = self._running.get(number)
            if running is None or running.code is not None:
                self._waits.remove((question, number))
                self._answer(question, {"code": -9} if running is None else self._outcome(running))
        for number in set(self._takes) - set(self._running):
            self._answer(self._takes.pop(number)[0], {"ended": True})

    def _hand_over(self, number: int, running: Running) -> None:
        """Answer a question for output, if there is any, or there will be none, or it has waited long enough."""
        question, deadline = self._takes[number]
        output = running.outputs[0]
        ended = running.code is not None or output.number < 0
        if ended:
            output.drain()  # what there was no room for
        if output.held or ended or deadline.over:
            del self._takes[number]
            body = output.take()
            if ended and not body:
                output.close()
            self._answer(question, {"ended": ended and not body}, body)

    def _outcome(self, running: Running) -> dict[str, Any]:
        return {"code": running.code, "late": running.late, "limit": running.limit}

    def _end_of(self, running: Running) -> Message:
        """What became of a command; its outputs are read no more, but emptied for those that still write."""
        texts = [output.take() for output in running.outputs]
        head = {"sizes": [len(text) for text in texts], "cut": [output.cut for output in running.outputs]}
        self._left += [output for output in running.outputs if output.number >= 0]
        return self._outcome(running) | head, b"".join(texts)
