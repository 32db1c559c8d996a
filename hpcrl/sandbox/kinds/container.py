"""A box in a container of another program, as its keeper starts it, and ends it.

Invariant: what the program was started with holds nothing of the run but two sockets; when the keeper is done, the
box's first process has ended, by number as the kernel tells it, and so has the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct

from hpcrl.sandbox.box_root import SYSTEM_IMAGE
from hpcrl.sandbox.kinds.container_kind import ContainerKind, module_of
from hpcrl.sandbox.kinds.first_process import MADE, MOST_DISKS
from hpcrl.sandbox.kinds.inside import VARIABLES, first_process_words
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.system_calls import PARENT_DEATH_SIGNAL, prctl, read_kernel, write_kernel
from hpcrl.utils.deadline import Deadline, poll

_CREDENTIALS = struct.Struct("3i")
_SAID = 4096  #: last bytes of what the program says that are read
_ENDING = 10.0  #: seconds that the end of a first process may take
_LOOK = 0.002
#: processes of this user's that may come while the box lives, where the kernel counts them with those of the box
_MORE = 512


def start_container(
    kind: ContainerKind,
    image: str,
    limits: BoxLimits,
    others: int,
    talk: socket.socket,
    keeper: socket.socket,
    said: int,
) -> int:
    """Fork, and start the program that makes the box; its process id.

    Args:
        others: processes of this user's that there are.
        keeper: the box's end of the socket to its keeper.
        said: number of the file for what the program says.

    Raises:
        OSError: if it cannot be started.
    """
    told = {"limits": vars(limits), "others": others + _MORE, "user": os.readlink("/proc/self/ns/user")}
    command = first_process_words(talk.fileno(), keeper.fileno(), json.dumps(told))
    words = module_of(kind.name).start_words(kind, "" if image == SYSTEM_IMAGE else image, limits, command)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **VARIABLES}
    for name in ("APPTAINER", "SINGULARITY"):
        environment |= {f"{name}_CONFIGDIR": kind.state}
        environment |= {f"{name}ENV_{variable}": value for variable, value in VARIABLES.items()}
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        with contextlib.suppress(OSError):
            write_kernel("/proc/self/oom_score_adj", "1000")  # here, for inside /proc may be read-only
        if os.getppid() == parent:
            for number in (talk.fileno(), keeper.fileno()):
                os.set_inheritable(number, True)
            null = os.open("/dev/null", os.O_RDWR)
            for number, place in ((null, 0), (null, 1), (said, 2)):
                os.dup2(number, place)
            os.chdir("/")
            os.execve(words[0], words, environment)
    finally:
        os._exit(127)


def receive_made(keeper: socket.socket) -> tuple[bool, list[int], int]:
    """(whether the box is made, files that it sends, its first process's number out here).

    The socket must have SO_PASSCRED, so that the number is the kernel's.

    Raises:
        TimeoutError: if it says nothing in time.
    """
    room = socket.CMSG_SPACE(4 * (MOST_DISKS + 2)) + socket.CMSG_SPACE(_CREDENTIALS.size)
    word, more, _, _ = keeper.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC)
    files: list[int] = []
    pid = 0
    for level, kind, data in more:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files += [number for (number,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack_from(data)[0]
    return word == MADE and len(files) >= 2, files, pid


class FirstProcess:
    """The first process of a container, as it can be ended whatever the program that started it does."""

    def __init__(self, pid: int) -> None:
        """Hold it: it must live, and `pid` be the kernel's word."""
        self._pid = pid
        self._begun = _begun(pid)
        self._number = -1
        with contextlib.suppress(OSError):  # Linux before 5.3
            self._number = os.pidfd_open(pid)

    def end(self) -> None:
        """End it, and wait until it has, with all that is in its PID namespace."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._number >= 0:
                signal.pidfd_send_signal(self._number, signal.SIGKILL)
            elif self._lives():
                os.kill(self._pid, signal.SIGKILL)
        poll(lambda: not self._lives(), Deadline(_ENDING), _LOOK)
        if self._number >= 0:
            os.close(self._number)

    def _lives(self) -> bool:
        return bool(self._begun) and _begun(self._pid) == self._begun


def _begun(pid: int) -> str:
    """When a process began, which tells it from another of its number; "" if it has ended, or there is none."""
    if pid > 1:
        with contextlib.suppress(OSError, IndexError):
            words = read_kernel(f"/proc/{pid}/stat").rpartition(")")[2].split()
            return "" if words[0] in "ZX" else words[19]
    return ""


def failure(said: int, program: str) -> str:
    """Why the program has made nothing, by the last line that it has written."""
    size = os.fstat(said).st_size
    text = os.pread(said, _SAID, max(0, size - _SAID)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    name = os.path.basename(program)
    return f"{name} says: {lines[-1][:300]}" if lines else f"{name} has started nothing, and does not say why"
