"""A command run as in a container of Docker's, on a machine that allows more: `python -m tests.support.restricted -- ...`.

    python -m tests.support.restricted -- make test

The command, and all that it starts, has no capability but those that Docker gives root by default, and is refused what
makes namespaces and mounts, as by Docker's own filter.

Invariant: the command runs with all of that taken away, or not at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

from hpcrl.sandbox.inside.kernel import check, libc, prctl
from hpcrl.sandbox.inside.seccomp import ARCHITECTURES

#: call -> its number on x86_64, on aarch64
CALLS = {
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
NAMESPACES = 0x7E020000  #: CLONE_NEW* of clone(2)
KEPT = (
    0xA80425FB  #: capabilities: chown to kill, setgid to net_bind_service, net_raw, sys_chroot, mknod, audit_*, setfcap
)
_LAST = 63  #: the number of the last capability that a kernel could have
_DROP_BOUND = 24  #: PR_CAPBSET_DROP
_NO_NEW_PRIVILEGES = 38  #: PR_SET_NO_NEW_PRIVS
_VERSION = 0x20080522  #: _LINUX_CAPABILITY_VERSION_3
_LOAD = 0x20  #: BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  #: BPF_JMP | BPF_JEQ | BPF_K
_BITS = 0x45  #: BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000  #: with the error's number
_NUMBER = 0  #: of struct seccomp_data: where the call's number is
_ARGUMENT = 16  #: the same: its first argument
_FILTER = 1  #: SECCOMP_SET_MODE_FILTER
_SECCOMP = (317, 277)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def filter_code(machine: int) -> bytes:
    """The filter, as classic BPF.

    Args:
        machine: index of this one's numbers in the tables.
    """
    refuse = _REFUSE | errno.EPERM
    lines = [(_LOAD, 0, 0, _NUMBER)]
    for numbers in CALLS.values():
        lines += [(_EQUAL, 0, 1, numbers[machine]), (_RETURN, 0, 0, refuse)]
    # its arguments lie in memory, which no filter sees: C libraries then take clone
    lines += [(_EQUAL, 0, 1, CLONE3[machine]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 3, CLONE[machine]), (_LOAD, 0, 0, _ARGUMENT), (_BITS, 0, 1, NAMESPACES)]
    lines += [(_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def drop_capabilities() -> None:
    """Take all but KEPT from this process and from all that it starts, set-user-ID programs included."""
    for number in range(_LAST + 1):
        if not KEPT >> number & 1:  # the kernel refuses numbers that it does not have, and ordinary users
            libc.prctl(_DROP_BOUND, ctypes.c_ulong(number), 0, 0, 0)
    head = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION, 0), 8)
    held = ctypes.create_string_buffer(24)
    check(libc.capget(head, held), "reading the capabilities")
    kept = [word & KEPT for word in struct.unpack("=6I", held.raw)[:3]]  # the other three: capabilities from 32
    check(libc.capset(head, struct.pack("=6I", *kept, 0, 0, 0)), "dropping capabilities")


def restrict() -> None:
    """Take all of it from this process, for good."""
    machine = list(ARCHITECTURES).index(os.uname().machine)
    code = filter_code(machine)
    program = _Program(len(code) // 8, code)
    if os.geteuid() != 0:
        prctl(_NO_NEW_PRIVILEGES, 1, "giving up new privileges")  # or a filter is for administrators alone
    # before the capabilities go, of which it needs one
    check(libc.syscall(_SECCOMP[machine], _FILTER, 0, ctypes.byref(program)), "setting the filter")
    drop_capabilities()


def main(words: list[str]) -> None:
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        sys.exit("usage: python -m tests.support.restricted -- COMMAND ...")
    restrict()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
