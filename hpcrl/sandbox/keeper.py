"""The process outside of a box that made it, watches what it uses, and ends it.

Its parent is the spawner, its only child the first process of the box.

Invariant: a box is confined as a command of `main.py` is, or its user is told why it cannot be; it has ended, with all
that runs in it, when this process does, and this process ends with the spawner.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

from hpcrl.sandbox.box_init import ENDED
from hpcrl.sandbox.box_root import enter_box
from hpcrl.sandbox.confine import OWN, become_own_user
from hpcrl.sandbox.frames import pack
from hpcrl.sandbox.kinds.container import FirstProcess, failure, receive_made, start_container
from hpcrl.sandbox.kinds.container_kind import ContainerKind
from hpcrl.sandbox.kinds.first_process import for_now, serve_confined
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.system_calls import (
    NEW_PIDS,
    PARENT_DEATH_SIGNAL,
    prctl,
    reason,
    unshare,
    write_kernel,
)
from hpcrl.sandbox.usage import POLL, START, bound_numbers, come_first, kernel, threads_of_user, usage
from hpcrl.utils.deadline import Deadline, poll

LIMIT = "limit: "  #: begins the reason for which a box was ended, where that is what ran in it
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SLOWEST = 0.05  #: seconds between two looks at what uses little
_TIDY = 1.0  #: seconds that a program has to put away what it has of a container that has ended
_LOOK = 0.002
_HAS_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
_PATIENCE = 5.0  #: seconds that the first process has to end what is over a limit, and to wait for its end
_KEPT_BACK = 384  #: process ids that the kernel gives none of to a namespace whose ids were all given once


def keep_box(
    spawner: int,
    image: str,
    limits: BoxLimits,
    kind: ContainerKind | None,
    talk: socket.socket,
    lifeline: socket.socket,
) -> None:
    """Make a box, and watch it until it ends or is to end; then this process ends.

    Args:
        spawner: the process id of this one's parent.
        kind: whose container the box is in; None: it is of namespaces that this process makes.
        talk: the user's questions come through it; the box says there first that it is ready, or why it is not.
        lifeline: closed by the spawner when the box is to end; told why it has ended by itself.
    """
    why = ""
    try:
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        if os.getppid() == spawner:
            come_first()
            if kind is None:
                why = _keep_ours(image, limits, talk, lifeline)
            else:
                why = _keep_container(kind, image, limits, talk, lifeline)
    except OSError as error:
        why = f"there was no room to make it: {error.strerror}"
        if not for_now(error):
            with contextlib.suppress(OSError):
                talk.send(pack({"n": 0, "refused": reason(error)}))
    with contextlib.suppress(OSError):
        lifeline.send(why.encode())
    os._exit(0)


def _keep_ours(image: str, limits: BoxLimits, talk: socket.socket, lifeline: socket.socket) -> str:
    """Make the box's namespaces, and watch it: why it was ended by force, or ""."""
    # this process (on an old kernel all of this user's), the box's first one, and one too many, which `_watch` sees
    others = 2 + (threads_of_user() if kernel() < (5, 14) else 1)
    become_own_user(NEW_PIDS)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        for number in (mine, lifeline):
            number.close()
        _become_box(image, limits, others, talk, its)
    for number in (talk, its):
        number.close()
    try:
        return _watch(child, limits, mine, lifeline)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # which is when all that it has started has ended


def _become_box(image: str, limits: BoxLimits, others: int, talk: socket.socket, keeper: socket.socket) -> None:
    """Become the first process of a box, confined, and serve it."""
    try:
        os.setsid()
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        write_kernel("/proc/self/oom_score_adj", "1000")  # a node without memory ends these first, not the run
        bound_numbers(limits.processes + _KEPT_BACK)
        unshare(OWN)
        disk = enter_box(image, limits.disk, limits.inodes)
        serve_confined(talk, keeper, limits.of_process(others), [disk.folder], disk.layered)
    except BaseException as error:  # noqa: BLE001  (nothing may get past this)
        if not for_now(error) and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):
                talk.send(pack({"n": 0, "refused": reason(error)}))
        os._exit(1)


def _keep_container(
    kind: ContainerKind,
    image: str,
    limits: BoxLimits,
    talk: socket.socket,
    lifeline: socket.socket,
) -> str:
    """Have another program make the box, and watch it, as `_keep_ours`."""
    said = os.memfd_create("said", os.MFD_CLOEXEC)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    child = start_container(kind, image, limits, threads_of_user(), talk, its, said)
    its.close()
    first: list[FirstProcess] = []
    try:
        why = _watch(child, limits, mine, lifeline, first)
        if not first and not why:
            with contextlib.suppress(OSError):
                talk.send(pack({"n": 0, "refused": failure(said, kind.program)}))
        return why
    finally:
        mine.close()  # which ends the first process as well, whatever becomes of its number
        for one in first:
            one.end()
        if not first or not poll(lambda: os.waitid(os.P_PID, child, _HAS_ENDED), Deadline(_TIDY), _LOOK):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        talk.close()


def _watch(
    child: int,
    limits: BoxLimits,
    box: socket.socket,
    lifeline: socket.socket,
    first: list[FirstProcess] | None = None,
) -> str:
    """Watch a box until it ends; why it is to be ended, "" if it did so itself or its user wants it.

    Args:
        first: of a container: gets its first process, once that is there.
    """
    box.settimeout(START)
    try:
        made, files, pid = receive_made(box)
        if made:
            if first is not None:
                first.append(FirstProcess(pid))
            box.send(b"seen")
            box.setblocking(False)
            return _Watch(limits, box, lifeline, *files).run()
    except TimeoutError:
        return f"making it took more than {START:g} s"
    return ""


class _Watch:
    """Looks at a box while anything runs in it but its first process."""

    def __init__(
        self,
        limits: BoxLimits,
        box: socket.socket,
        lifeline: socket.socket,
        proc: int,
        *disks: int,
    ) -> None:
        self._proc = f"/proc/self/fd/{proc}"
        self._disks = disks
        self._written = (0, 0)  #: (bytes, files) that the box's disks hold
        self._begun = (0, 0)
        self._begun = self._look_at_disks()
        self._limits = limits
        self._box = box
        self._lifeline = lifeline
        self._strikes: Deadline | None = None  #: until when it may be over a limit
        self._ending = False  #: what ran over a limit has not ended yet

    def run(self) -> str:
        """Why the box is to be ended by force; "" otherwise."""
        poll = select.poll()
        for one in (self._box, self._lifeline):
            poll.register(one, select.POLLIN)
        pause: float | None = None
        over = ""
        while True:
            ready = dict(poll.poll(None if pause is None else pause * 1000))
            if self._lifeline.fileno() in ready:
                return ""
            if self._box.fileno() in ready:
                said = self._box.recv(64)
                if not said:
                    return ""
                if said == ENDED:
                    self._ending = False
                pause = POLL
            late = self._strikes is not None and self._strikes.over
            if self._ending:  # what is seen meanwhile would be held against the next command
                if late:
                    return LIMIT + over
                continue
            processes, used = self._usage()
            if over := self._over(processes, used):
                if late:
                    return LIMIT + over
                self._strikes = self._strikes or Deadline(_PATIENCE)
                self._ending = True
                with contextlib.suppress(BlockingIOError):  # it does not listen: its time runs
                    self._box.send(over.encode())
                pause = POLL
                continue
            self._strikes = None
            near = 2 * processes > self._limits.processes or 2 * used > self._limits.memory
            pause = None if processes <= 1 else POLL if near else min(1.3 * (pause or POLL), _SLOWEST)

    def _usage(self) -> tuple[int, int]:
        """(processes, bytes) of the box, its disk included."""
        processes, used = usage(self._proc, self._limits.processes + 2, but="1")
        self._written = self._look_at_disks()
        return processes, used + self._written[0]

    def _look_at_disks(self) -> tuple[int, int]:
        """(bytes, files) that were written since the box began."""
        found = [os.fstatvfs(disk) for disk in self._disks]
        size = sum((disk.f_blocks - disk.f_bfree) * disk.f_frsize for disk in found)
        return size - self._begun[0], sum(disk.f_files - disk.f_ffree for disk in found) - self._begun[1]

    def _over(self, processes: int, used: int) -> str:
        if processes > self._limits.processes + 1:
            return f"it had more than {self._limits.processes} processes"
        if used > self._limits.memory:
            return f"it took more than {self._limits.memory >> 20} MiB of memory"
        # in a box of ours the kernel refuses more
        if self._written[0] > self._limits.disk + _PAGE:
            return f"it wrote more than {self._limits.disk >> 20} MiB"
        if self._written[1] > self._limits.inodes:
            return f"it wrote more than {self._limits.inodes:,} files"
        return ""
