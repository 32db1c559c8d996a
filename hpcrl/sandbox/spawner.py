"""The process that forks boxes, so that each takes milliseconds: `python -m hpcrl.sandbox.spawner CONTROL PARENT`.

CONTROL is the number of an open socket of packets, of JSON: `{"make": number, "image": ..., "limits": {...}, "kind":
...}` with one file, the box's end of a stream, and `{"end": number}`; `{"ended": number, "why": ...}`
is answered once for each.

Invariant: it ends with the process that started it, and every box ends with it; it holds nothing of that process but
the socket, has no secret in its memory or environment, and has one thread.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from hpcrl.sandbox.keeper import keep_box
from hpcrl.sandbox.kinds.container_kind import ContainerKind, module_of
from hpcrl.sandbox.limits import BoxLimits

_PACKET = 1 << 16
_LOOK = 1.0  #: seconds between two looks at the parent, where the kernel cannot say that it has ended


class _Boxes:
    """The boxes that were forked and have not ended."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._boxes: dict[int, tuple[int, socket.socket]] = {}  #: number -> (keeper, its lifeline)

    def serve(self) -> None:
        """Fork and end boxes until the process that wants them is gone."""
        watched = self._pidfd()
        while os.getppid() == self._parent:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if watched >= 0:
                poll.register(watched, select.POLLIN)
            for _, lifeline in self._boxes.values():
                poll.register(lifeline, select.POLLIN)
            ready = dict(poll.poll(None if watched >= 0 else _LOOK * 1000))
            if watched in ready:
                return
            for number, (keeper, lifeline) in list(self._boxes.items()):
                if lifeline.fileno() in ready:
                    self._bury(number, keeper, lifeline)
            if self._control.fileno() in ready and not self._hear():
                return

    def end(self) -> None:
        """End every box, and wait until nothing of any is left."""
        for _, lifeline in self._boxes.values():
            lifeline.close()
        for keeper, _ in self._boxes.values():
            os.waitpid(keeper, 0)

    def _pidfd(self) -> int:
        with contextlib.suppress(OSError, AttributeError):  # Linux before 5.3
            return os.pidfd_open(self._parent)
        return -1

    def _hear(self) -> bool:
        """Do what is asked; False when there will be no more."""
        data, files, _, _ = socket.recv_fds(self._control, _PACKET, 1)
        for number in files:
            os.set_inheritable(number, False)  # as no received file is: a command must never have its box's stream
        if not data:
            return False
        wish: dict[str, Any] = json.loads(data)
        if "make" in wish:
            self._try_make(wish, files)
        elif wish["end"] in self._boxes:
            # a keeper in an ordered end waits for all that is in its box; its own end is seen as any other
            self._boxes[wish["end"]][1].shutdown(socket.SHUT_WR)
        return True

    def _try_make(self, wish: dict[str, Any], files: list[int]) -> None:
        """Make a box; where this process has no room for it, that box alone is lost."""
        try:
            if not files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._make(wish, files[0])
        except OSError as error:
            for number in files:
                with contextlib.suppress(OSError):
                    os.close(number)
            self._tell_end(wish["make"], f"its spawner has no room for it: {error.strerror}")

    def _make(self, wish: dict[str, Any], talk: int) -> None:
        kind = ContainerKind(*wish["kind"]) if wish["kind"] else None
        if kind:
            module_of(kind.name)  # here, so that not every box imports it
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spawner = os.getpid()
        try:
            keeper = os.fork()
        except OSError:
            mine.close()
            its.close()
            raise
        if keeper == 0:
            kept = {0, 1, 2, talk, its.fileno()}
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in kept:
                    with contextlib.suppress(OSError):  # that of the list itself
                        os.close(int(name))
            limits = BoxLimits(**wish["limits"])
            keep_box(spawner, wish["image"], limits, kind, socket.socket(fileno=talk), its)
        os.close(talk)
        its.close()
        self._boxes[wish["make"]] = (keeper, mine)

    def _bury(self, number: int, keeper: int, lifeline: socket.socket) -> None:
        """A keeper says why it ends, or has ended without a word."""
        why = ""
        with contextlib.suppress(OSError):
            why = lifeline.recv(1 << 12).decode(errors="replace")
        lifeline.close()
        del self._boxes[number]
        _, status = os.waitpid(keeper, 0)
        if status and not why:
            why = f"its keeper ended with {os.waitstatus_to_exitcode(status)}"
        self._tell_end(number, why)

    def _tell_end(self, number: int, why: str) -> None:
        with contextlib.suppress(OSError):  # the user is gone: the next look sees that
            self._control.send(json.dumps({"ended": number, "why": why}).encode())


def main(argv: list[str]) -> int:
    """Serve; every box ends with this process."""
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    os.chdir("/")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    gc.freeze()  # what is there now is never looked at, and so stays shared with the boxes
    boxes = _Boxes(control, int(argv[1]))
    boxes.serve()
    boxes.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
