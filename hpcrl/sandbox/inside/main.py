"""The first process of a box: it sees that all is as it must be, gives up its rights, and serves (`first.py`).

    python3 -c ... TALK WATCHER TOLD LAYERED

TALK and WATCHER are numbers of open sockets; TOLD is JSON: `limits` of each process, `old` (where the root before lies,
"" where there is none), `uid` and `gid` (to become, where `old` is given).  LAYERED is 1 if all of the image can be
changed.

Invariant: nothing is answered before every right is given up, and nothing that the user asks for runs before that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from hpcrl.sandbox.inside import frames, seccomp
from hpcrl.sandbox.inside.files import WORK
from hpcrl.sandbox.inside.first import BoxInit
from hpcrl.sandbox.inside.kernel import DEATH_SIGNAL, NO_DUMP, drop_capabilities, leave_root, prctl, read_kernel

START = 30.0  #: seconds that making a box may take
MADE = b"made"
MOST_DISKS = 12  #: file systems that can be written to
_OF_KERNEL = ("proc", "mqueue", "devpts", "sysfs", "cgroup", "cgroup2")
_MEMORY = ("tmpfs", "ramfs")
_USED_UP = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def main(argv: Sequence[str]) -> None:
    """Be the first process of a box until it is to end; an error of this process's ends the box as well."""
    talk, watcher = (socket.socket(fileno=int(number)) for number in argv[:2])
    ready = False
    try:
        for end in (talk, watcher):
            end.set_inheritable(False)
        told = json.loads(argv[2])
        layered = argv[3] == "1"
        disks = _enter(told, layered, {talk.fileno(), watcher.fileno()})
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        socket.send_fds(watcher, [MADE], [proc, *disks])
        watcher.settimeout(START)
        watcher.recv(16)  # it has them, and would see nothing of this process later
        for number in (proc, *disks[1:]):
            os.close(number)
        drop_capabilities()
        prctl(NO_DUMP, 0, "hiding the first process from those inside")
        seccomp.refuse_calls()  # this process is one of them
        talk.send(frames.pack({"n": 0, "ready": True, "layered": layered}))
        ready = True
        BoxInit(talk, watcher, {int(name): most for name, most in told["limits"].items()}, disks[0]).serve()
    except BaseException as error:  # noqa: BLE001  (there is no terminal to show it on)
        text = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        lost = ready or (isinstance(error, OSError) and error.errno in _USED_UP)  # what may be there again
        with contextlib.suppress(OSError):
            talk.send(frames.pack({"n": -1, "broken": text} if lost else {"n": 0, "refused": text}))
    os._exit(0)


def _enter(told: dict[str, Any], layered: bool, kept: set[int]) -> list[int]:
    """See that all is as it must be, and hold nothing else of outside: open directories of what can be written to.

    Args:
        kept: numbers of files that stay open.
    """
    if os.getpid() != 1:
        raise OSError(errno.EPERM, "it has no PID namespace of its own (a setting of the site's?)")
    if told["old"]:
        leave_root(told["old"], told["uid"], told["gid"])
    prctl(DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
    null = os.open("/dev/null", os.O_RDONLY)
    for number in range(3):  # that of outside is one whose mode user 0 could change
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    os.chdir(WORK)
    os.environ.clear()
    return _disks(layered)


def _disks(layered: bool) -> list[int]:
    """An open directory of each file system that can be written to, /work's first.

    Args:
        layered: the root is an image with memory over it.

    Raises:
        OSError: if one is no memory, or if there are more than a watcher can count.
    """
    found = {os.stat(WORK).st_dev: os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)}
    for line in read_kernel("/proc/self/mountinfo").splitlines():
        cells, _, more = line.partition(" - ")
        place = cells.split(" ")[4].encode().decode("unicode_escape")
        kind = more.split(" ")[0]
        if (
            kind in _OF_KERNEL
            or (place == "/" and layered)
            or not os.path.isdir(place)
            or not os.access(place, os.W_OK)
        ):
            continue
        if kind not in _MEMORY:
            raise OSError(errno.EPERM, f"{place} can be written to inside, and is a {kind} of the host")
        number = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        device = os.fstat(number).st_dev
        if device in found:
            os.close(number)
        else:
            found[device] = number
    if len(found) > MOST_DISKS:
        raise OSError(errno.E2BIG, "too many writable mounts to watch")
    if os.fstatvfs(next(iter(found.values()))).f_blocks == 0:
        raise OSError(errno.EPERM, f"{WORK} is no memory")
    return list(found.values())
