"""The system calls with which a box's first process gives up its rights, as far as Python has none of its own.

Invariant: a call that fails raises OSError; none fails unseen.
"""

from __future__ import annotations

import ctypes
import os
import struct

DEATH_SIGNAL = 1  #: PR_SET_PDEATHSIG: the signal that a process gets when its parent ends
NO_DUMP = 4  #: PR_SET_DUMPABLE, with 0: no other process of this user may trace it or open its /proc
_DROP_BOUND = 24
_NO_NEW_PRIVILEGES = 38
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION = 0x20080522
_NEW_USER = 0x10000000
_DETACH = 2
_MOST = 1 << 22  #: bytes of a file of the kernel's

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """`result`, unless it says that `what` has failed: OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def leave_root(old: str, uid: int, gid: int) -> None:
    """Let go of the root before, which lies at `old`, and have this user's own numbers again, in a user namespace in
    which the box's mounts cannot be changed."""
    this = os.open(f"{old}/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the box's own is read-only
    check(libc.umount2(os.fsencode(old), _DETACH), "leaving the root before")
    check(libc.unshare(_NEW_USER), "making a user namespace")
    for name, number in (("uid_map", uid), ("gid_map", gid)):
        file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=this)
        os.write(file, f"{number} 0 1".encode())
        os.close(file)
    os.close(this)


def drop_capabilities() -> None:
    """Give up all capabilities, for good: also what a program file or user 0 would have."""
    for capability in range(_LAST_CAPABILITY + 1):  # the kernel refuses numbers that it does not have
        libc.prctl(_DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    check(libc.capset(header, ctypes.create_string_buffer(24)), "dropping capabilities")
    prctl(_NO_NEW_PRIVILEGES, 1, "refusing new privileges")


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
