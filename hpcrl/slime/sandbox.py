"""A bash that can do no harm: `python -m hpcrl.slime.sandbox SCRATCH BASH WORDS ...` becomes it, confined by the
kernel.

It sees the files of this machine, and can write to SCRATCH alone; it has no network, sees no other processes, and has
limits of time and memory.  Linux namespaces do that where users may make them, else Landlock, which leaves out the
processes and, on older kernels, the network: the first line of standard error says which (`Confined`).

Invariant: nothing is started where neither can be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

NAMESPACES = "namespaces"
LANDLOCK = "landlock"
LANDLOCK_WITH_NETWORK = "landlock, network open"
PROCESSES = 128  #: that it may have at once
UNCONFINED = 97  #: exit status where the kernel cannot confine

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/landlock.h; system calls have these numbers on every architecture
# since 2021
_NEW_USER = 0x10000000
_NEW_NS = 0x20000
_NEW_NET = 0x40000000
_NEW_PID = 0x20000000
_NEW_IPC = 0x8000000
_NEW_UTS = 0x4000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_NOSUID_NODEV_NOEXEC = 0xE
_SYS_MOUNT_SETATTR = 442
_SYS_CREATE_RULESET = 444
_SYS_ADD_RULE = 445
_SYS_RESTRICT_SELF = 446
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_READ_ONLY = 1
_PDEATHSIG = 1
_CAPBSET_DROP = 24
_NO_NEW_PRIVS = 38
_SIGKILL = 9
_LAST_CAP = 63
_WRITES = sum(1 << bit for bit in (1, *range(4, 14)))  #: Landlock's rights that change files: write, remove, make
_TRUNCATE, _TCP = 1 << 14, 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Confine this process to argv[0] and become argv[1:]; returns the exit status of what ran."""
    scratch, command = argv[0], argv[1:]
    _check(_libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_PID | _NEW_IPC | _NEW_UTS) == 0:
        _map_ids(uid, gid)
        return _in_child(lambda: _namespaces(scratch), command, NAMESPACES)
    network = _landlock(scratch)
    if network is None:
        print("this kernel lets users neither make namespaces nor use Landlock", file=sys.stderr)
        return UNCONFINED
    return _in_child(lambda: None, command, LANDLOCK if network else LANDLOCK_WITH_NETWORK)


def _in_child(confine: Callable[[], None], command: list[str], how: str) -> int:
    """Become `command` in a child, which is the first process of a new PID namespace: when it ends, so do all others
    there."""
    child = os.fork()
    if child == 0:
        try:
            _check(_libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))
            confine()
            _limits(namespaces=how == NAMESPACES)
            print(how, file=sys.stderr, flush=True)
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
                signal.signal(ignored, signal.SIG_DFL)
            os.execv(command[0], command)
        except OSError as error:
            print(f"cannot be confined: {error}", file=sys.stderr, flush=True)
        os._exit(UNCONFINED)
    return os.waitstatus_to_exitcode(_watch(child) if how == NAMESPACES else os.waitpid(child, 0)[1])


def _watch(child: int) -> int:
    """Wait for the first process of a PID namespace, and end them all if they become too many: the limit spares
    root."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if os.getuid() == 0 and _processes(child) > PROCESSES:
            print(f"has more than {PROCESSES} processes", file=sys.stderr, flush=True)
            os.kill(child, _SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.02)


def _processes(child: int) -> int:
    """How many processes are in the PID namespace of one; 0 when it has ended.

    The child has mounted its own /proc, where this process is not, unless it was not allowed to.
    """
    ours = os.path.exists("/proc/self")  # looked at first: it may be mounted in between
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    if not ours:
        return len(pids)
    namespaces = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            namespaces[int(pid)] = os.readlink(f"/proc/{pid}/ns/pid")
    return sum(namespace == namespaces.get(child) for namespace in namespaces.values())


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _map_ids(uid: int, gid: int) -> None:
    """Inside, the user keeps its id, and no other id exists."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _namespaces(scratch: str) -> None:
    """Every file system read-only but `scratch`; no capabilities that could undo it."""
    place = scratch.encode()
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    with contextlib.suppress(
        OSError
    ):  # containers forbid it; then /proc shows the processes outside, which stay out of reach
        _check(_libc.mount(b"proc", b"/proc", b"proc", _NOSUID_NODEV_NOEXEC, None))
    _check(_libc.mount(place, place, None, _MS_BIND, None))
    _set_attributes(b"/", _AT_RECURSIVE, set_=_READ_ONLY)
    _set_attributes(place, 0, clear=_READ_ONLY)
    for capability in range(_LAST_CAP + 1):  # numbers that this kernel does not have are refused, which is as well
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)


def _set_attributes(path: bytes, flags: int, set_: int = 0, clear: int = 0) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", set_, clear, 0, 0), 32)
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, ctypes.c_size_t(32)))


def _landlock(scratch: str) -> bool | None:
    """Refuse writes outside of `scratch`, and TCP where the kernel can; whether it can; None: there is no Landlock."""
    version = _libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return None
    writes = _WRITES | (_TRUNCATE if version >= 3 else 0)
    rules = struct.pack("=QQ", writes, _TCP) if version >= 4 else struct.pack("=Q", writes)
    buffer = ctypes.create_string_buffer(rules, len(rules))
    ruleset = _libc.syscall(_SYS_CREATE_RULESET, buffer, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    if ruleset < 0:
        return None
    for path in (scratch, "/dev/null"):
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = writes if path == scratch else 1 << 1 | (writes & _TRUNCATE)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, file), 12)
        _check(_libc.syscall(_SYS_ADD_RULE, ruleset, ctypes.c_int(1), rule, ctypes.c_uint32(0)))
        os.close(file)
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(_SYS_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))
    return version >= 4


def _limits(namespaces: bool) -> None:
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    wanted = {
        resource.RLIMIT_CPU: 20,
        resource.RLIMIT_FSIZE: 16 << 20,
        resource.RLIMIT_AS: 2 << 30,
        resource.RLIMIT_NOFILE: 256,
    }
    if namespaces:  # elsewhere it would count all of the user's processes
        wanted[resource.RLIMIT_NPROC] = PROCESSES
    for what, most in wanted.items():
        hard = resource.getrlimit(what)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
