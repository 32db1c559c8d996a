"""Watching the processes that write a checkpoint: Megatron forks one for each file (a later release uses threads), and
would wait for ever for one that is killed.

Invariant: a process that waits for such a process learns within a second that it was killed, and by what; one that
fails reports its own error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import psutil

from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import MemoryWatch, how_it_ended

AGAIN = 0.5  #: seconds between two looks for an ended process whose signal has not ended the wait
WAITING = (
    os.path.dirname(multiprocessing.__file__) + os.sep,
    selectors.__file__,
)  #: whose code waits for such processes


def write_here(request: Any) -> None:
    """Write this rank's part of a checkpoint: what Megatron's AsyncRequest asks for, if anything.

    Raises:
        HpcrlError: if a writer is killed.
    """
    if request.async_fn is None:
        return
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()  # GPU tensors into host memory
    with killed_writers_told():
        request.async_fn(*arguments, **request.async_fn_kwargs)


@contextlib.contextmanager
def killed_writers_told() -> Iterator[None]:
    """Raise HpcrlError, out of whatever is being waited for, as soon as a process that was started in here is killed.

    A signal handler raises it, which Python runs in the main thread alone: in other threads nothing is watched.  It
    raises out of the code of multiprocessing only: what Python calls around a fork swallows an exception, and a lock of
    logging would stay held.  So the signal is sent again while an ended process has not been waited for, which also
    ends a wait that began just after the first one.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    memory = MemoryWatch()
    ours = psutil.Process()
    earlier = {child.pid for child in ours.children()}

    def look(_: int, frame: FrameType | None) -> None:
        if frame is None or not frame.f_code.co_filename.startswith(WAITING):
            return
        for child in ours.children():
            if child.pid not in earlier and (number := _killed_by(child.pid)):
                raise HpcrlError(f"a process that wrote it {how_it_ended(-number, memory)}")

    def again() -> None:
        while not over.wait(AGAIN):
            if _child_has_ended() and main.ident is not None:
                signal.pthread_kill(main.ident, signal.SIGCHLD)

    over = threading.Event()
    before = signal.signal(signal.SIGCHLD, look)
    reminder = threading.Thread(target=again, name="killed writers", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        over.set()
        reminder.join(10)
        signal.signal(signal.SIGCHLD, before)


def _child_has_ended() -> bool:
    """Whether a child that has not been waited for has ended."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _killed_by(pid: int) -> int:
    """The signal that killed a child, which its parent can still wait for; 0 if none did, or it lives."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_status if found and found.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0
