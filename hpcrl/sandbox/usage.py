"""What the processes of a namespace use, and what keeps them from using more: shared by a command and a box.

Invariant: numbers come from the kernel as it shows that namespace, never from what runs in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Mapping

from hpcrl.sandbox.system_calls import read_kernel, write_kernel

POLL = 0.005  #: seconds between two looks at what may grow
START = 30.0  #: seconds that confining may take
_PAGE = os.sysconf("SC_PAGE_SIZE")


def kernel() -> tuple[int, int]:
    """The kernel's release, as far as features depend on it."""
    major, minor = (int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return major, minor


def usage(folder: str, most: int, but: str = "") -> tuple[int, int]:
    """(processes, bytes of memory that they hold) of a PID namespace.

    Args:
        folder: its /proc, seen from outside.
        most: processes of which the memory is counted: more are too many anyway, and looking at them takes time.
        but: a process whose memory is not counted.
    """
    pids: list[str] = []
    with contextlib.suppress(OSError):  # it has just ended
        pids = [name for name in os.listdir(folder) if name.isdigit()]
    used = 0
    for pid in pids[:most]:
        if pid != but:
            used += _resident(f"{folder}/{pid}")
    return len(pids), used


def _resident(process: str) -> int:
    """Bytes of a process that are in memory; of one whose first thread has ended, by any other."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if found := int(read_kernel(f"{process}/statm").split()[1]) * _PAGE:
            return found
        for thread in os.listdir(f"{process}/task"):
            if found := int(read_kernel(f"{process}/task/{thread}/statm").split()[1]) * _PAGE:
                return found
    return 0


def bound_numbers(most: int) -> None:
    """Let this PID namespace have `most` process ids: root's processes have no other limit of their number.

    Since Linux 6.14 each namespace has a pid_max of its own; before, the file is the whole machine's.
    """
    if os.getuid() == 0 and os.getpid() == 1 and kernel() >= (6, 14):
        with contextlib.suppress(OSError):
            write_kernel("/proc/sys/kernel/pid_max", str(most))


def come_first() -> None:
    """Have this process, and nothing that it starts, come before all others, where the kernel lets it: root's.

    Root's processes have no limit of their number, and thousands that fork would leave the one that counts them no time
    to end them.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def bound_process(limits: Mapping[int, int]) -> None:
    """Limit this process and those that it starts, as far as they are not limited more already.

    Args:
        limits: of `resource.RLIMIT_*`.
    """
    for what, most in limits.items():
        hard = resource.getrlimit(what)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)


def threads_of_user(folder: str = "/proc") -> int:
    """How many threads this user's processes have: before Linux 5.14 RLIMIT_NPROC of a namespace counts them all."""
    found = 0
    for name in filter(str.isdigit, os.listdir(folder)):
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has just ended
            lines = read_kernel(f"{folder}/{name}/status").splitlines()
            said = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
            if int(said["Uid:"]) == os.getuid():
                found += int(said["Threads:"])
    return found
