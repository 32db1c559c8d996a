"""The first process of a box, once its root directory and its namespaces are there: `serve_confined`, and `main` where
another program has made them.

    /.hpcrl/so/ld.so ... python3 -m hpcrl.sandbox.kinds.first_process TALK KEEPER TOLD

TALK and KEEPER are numbers of open sockets, TOLD is JSON: `limits`, `others` (processes outside that count where there
is no user namespace of the box's own) and `user` (the user namespace outside).

Invariant: nothing is answered before every right is given up, and nothing that the user asks for runs before that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from hpcrl.sandbox import seccomp
from hpcrl.sandbox.box_init import serve_box
from hpcrl.sandbox.frames import pack
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.system_calls import (
    NO_DUMP,
    PARENT_DEATH_SIGNAL,
    drop_capabilities,
    prctl,
    read_kernel,
    reason,
)
from hpcrl.sandbox.usage import START, kernel

WORK = "/work"
MOST_DISKS = 12  #: file systems that can be written to
MADE = b"made"
_USED_UP = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OF_KERNEL = ("proc", "mqueue", "devpts", "sysfs", "cgroup", "cgroup2")
_MEMORY = ("tmpfs", "ramfs")


def for_now(error: BaseException) -> bool:
    """Whether a box could not be made because something was used up, which may be there again: it is lost."""
    return isinstance(error, OSError) and error.errno in _USED_UP


def serve_confined(
    talk: socket.socket,
    keeper: socket.socket,
    limits: dict[int, int],
    disks: Sequence[int],
    layered: bool,
) -> None:
    """Give up what is left, say that the box is ready, and serve it until it ends; this process ends then.

    Args:
        limits: of each process, `resource.RLIMIT_*`.
        disks: numbers of open directories, one of each file system that can be written to; the first is /work's.
        layered: whether all of the image can be changed.

    Raises:
        OSError: if something cannot be given up.
    """
    for number in (1, 2):
        os.dup2(0, number)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(keeper, [MADE], [proc, *disks])
    os.close(proc)
    keeper.settimeout(START)
    keeper.recv(16)  # the keeper has them, and would see nothing of this process later
    for number in disks[1:]:
        os.close(number)
    drop_capabilities()
    prctl(NO_DUMP, 0, "hiding the first process from those inside")
    seccomp.refuse_calls(own_pids=True, only_itself=True)  # this process is one of them
    talk.send(pack({"n": 0, "ready": True, "layered": layered}))
    serve_box(talk, keeper, limits, disks[0])


def main(argv: list[str]) -> None:
    """Be the first process of a box in a container of another program's."""
    talk, keeper = (socket.socket(fileno=int(number)) for number in argv[:2])
    try:
        for end in (talk, keeper):
            end.set_inheritable(False)
        _close_others({0, 1, 2, talk.fileno(), keeper.fileno()})
        told = json.loads(argv[2])
        if os.getpid() != 1:
            raise OSError(errno.EPERM, "the container has no PID namespace of its own (a setting of the site's?)")
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
        os.chdir(WORK)
        disks = _disks()
        own = os.readlink("/proc/self/ns/user") != told["user"] and kernel() >= (5, 14)
        limits = BoxLimits(**told["limits"]).of_process(3 if own else told["others"])  # one too many, as in ours
        os.environ.clear()
        serve_confined(talk, keeper, limits, disks, layered=False)
    except BaseException as error:  # noqa: BLE001  (nothing may get past this)
        if not for_now(error) and not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):
                talk.send(pack({"n": 0, "refused": reason(error)}))
        os._exit(1)


def _close_others(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))


def _disks() -> list[int]:
    """An open directory of each file system that can be written to, /work's first.

    Raises:
        OSError: if one is no memory, or if there are more than a keeper can count.
    """
    found = {os.stat(WORK).st_dev: os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)}
    for line in read_kernel("/proc/self/mountinfo").splitlines():
        cells, _, more = line.partition(" - ")
        place = cells.split(" ")[4].encode().decode("unicode_escape")
        kind = more.split(" ")[0]
        if kind in _OF_KERNEL or not os.path.isdir(place) or not os.access(place, os.W_OK):
            continue
        if kind not in _MEMORY:
            raise OSError(errno.EPERM, f"{place} can be written to inside, and is a {kind} of the machine's")
        number = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        device = os.fstat(number).st_dev
        if device in found:
            os.close(number)
        else:
            found[device] = number
    if len(found) > MOST_DISKS:
        raise OSError(errno.E2BIG, "more places can be written to inside than can be watched")
    if os.fstatvfs(next(iter(found.values()))).f_blocks == 0:
        raise OSError(errno.EPERM, f"{WORK} is no memory")
    return list(found.values())


if __name__ == "__main__":
    main(sys.argv[1:])
