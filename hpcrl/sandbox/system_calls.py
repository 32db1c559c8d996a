"""The Linux system calls that confine a process, as far as Python has none of its own for them.

Invariant: a call that fails raises OSError; none fails unseen.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# linux/sched.h, linux/mount.h, linux/prctl.h
NEW_MOUNTS = 0x20000
NEW_CGROUP = 0x2000000
NEW_UTS = 0x4000000
NEW_IPC = 0x8000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

READ_ONLY = 0x1
NO_SUID = 0x2
NO_DEVICES = 0x4
NO_EXEC = 0x8
REMOUNT = 0x20
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000
DETACH = 2
#: flags of a mount that a remount must repeat, as mountinfo calls them
_KEPT = {"ro": 0x1, "nosuid": 0x2, "nodev": 0x4, "noexec": 0x8, "noatime": 0x400, "nodiratime": 0x800}
_RELATIME = 0x200000

PARENT_DEATH_SIGNAL = 1
NO_DUMP = 4  #: PR_SET_DUMPABLE, with 0: no other process of this user may trace it or open its /proc
_DROP_BOUND = 24
NO_NEW_PRIVILEGES = 38
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION = 0x20080522
_SYS_MOUNT_SETATTR = 442  #: on every architecture
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOST = 1 << 22  #: bytes of a file of the kernel's
#: what namespaces, and mounts in them, are refused with where users may make none
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSPC)
NO_NAMESPACES = (
    "; users may make no namespaces here (Ubuntu 24.04: AppArmor; Docker: seccomp; elsewhere "
    "user.max_user_namespaces): docs/security.md, What a site can do"
)

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """`result`, unless it says that `what` has failed: OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "making namespaces")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [word if word is None else os.fsencode(word) for word in (source, target, kind)]
    text = None if data is None else data.encode()
    check(libc.mount(*words, ctypes.c_ulong(flags), text), f"mounting {target}")


def bind(source: str, target: str, flags: int) -> None:
    """Show `source`, a file or a directory with all that is mounted below it, at `target` as well.

    Args:
        flags: restrictions, of READ_ONLY, NO_SUID, NO_DEVICES and NO_EXEC.
    """
    mount(source, target, None, BIND | RECURSIVE)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    words = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    if libc.syscall(_SYS_MOUNT_SETATTR, *words) < 0:  # Linux before 5.12
        _remount_all(target, flags)


def _remount_all(target: str, flags: int) -> None:
    """Restrict every mount at and below `target`, one by one."""
    top = os.path.realpath(target)
    for line in read_kernel("/proc/self/mountinfo").splitlines():
        cells = line.split(" ")
        place = cells[4].encode().decode("unicode_escape")  # a blank is \040 there
        if place == top or place.startswith(f"{top}/"):
            said = cells[5].split(",")
            kept = sum(flag for name, flag in _KEPT.items() if name in said) | (_RELATIME if "relatime" in said else 0)
            mount(None, place, None, REMOUNT | BIND | flags | kept)


def pivot_root(root: str) -> None:
    """Make the mount `root` this process's root, and let go of the one before."""
    os.chdir(root)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(number, b".", b"."), "changing the root")
    check(libc.umount2(b".", DETACH), "leaving the root before")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up all capabilities, for good: also what a program file or user 0 would have."""
    for capability in range(_LAST_CAPABILITY + 1):  # the kernel refuses numbers that it does not have
        libc.prctl(_DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    check(libc.capset(header, ctypes.create_string_buffer(24)), "dropping capabilities")
    prctl(NO_NEW_PRIVILEGES, 1, "refusing new privileges")


def read_kernel(path: str) -> str:
    """The text of a file of the kernel's."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < _MOST and (more := os.read(number, 1 << 16)):
            data += more
    finally:
        os.close(number)
    return data.decode(errors="replace")


def write_kernel(path: str, text: str) -> None:
    """Tell the kernel `text`, in one call."""
    number = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(number, text.encode())
    except OSError as error:  # which does not name the file
        raise OSError(error.errno, f"writing {path}: {error.strerror}") from error
    finally:
        os.close(number)


def reason(error: BaseException) -> str:
    """Which step of confining has failed, and who may have forbidden it."""
    if not isinstance(error, OSError):
        return repr(error)
    text = error.strerror or str(error)
    if error.filename is not None:  # not a call that makes or fills namespaces
        return f"{os.fsdecode(error.filename)}: {text}"
    return text + NO_NAMESPACES if error.errno in _FORBIDDEN else text
