"""System calls that a confined process is refused, as a filter that the kernel runs (seccomp with classic BPF).

Only calls that no text tool and no computation needs: those for administrators, debuggers and keyrings, those that make
namespaces and mounts, sockets, memory that is in no process and that no limit counts (of System V, without a name, in
messages), what uses up a bound of the whole machine, ioctls that type into a terminal, and all that are newer than this
list.  A process
without a PID namespace of its own is refused signals, and changes of other processes' priorities and limits, as well.

Invariant: a call of another architecture's numbering, which would be read wrongly here, ends the process; an
architecture whose numbers are not listed is refused altogether.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from hpcrl.sandbox.system_calls import check, libc

#: AUDIT_ARCH_*, linux/audit.h
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINES = tuple(ARCHITECTURES)
#: call -> its numbers on `_MACHINES`; -1: it is not there
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
#: the same for a process that sees those outside
SIGNALS = {
    "ioprio_set": (251, 30),
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}
#: of these, its first argument must be 0 then: itself
ITSELF = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
#: what makes another process, or another program of this one, besides a clone without CLONE_THREAD
PROGRAMS = {"execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1)}
_THREAD = 0x10000  #: CLONE_THREAD
_SETPRIORITY = (141, 140)  #: its second argument is the process
_CLONE = (56, 220)
_CLONE3 = (435, 435)  #: its flags lie in memory, where no filter sees them: libc uses clone where it is not there
_IOCTL = (16, 29)
_FCNTL = (72, 25)
_PRCTL = (157, 167)
_PARENT_DEATH = 1  #: PR_SET_PDEATHSIG: it has to end with the process that started it
_NEWEST = 461  #: later calls have the same numbers everywhere; of what they do nothing is known here
_NAMESPACES = 0x7E020000  #: every CLONE_NEW*
_TYPING = (0x5412, 0x541C, 0x5423)  #: TIOCSTI, TIOCLINUX, TIOCSETD
_OWNERS = (8, 10, 15)  #: F_SETOWN, F_SETSIG, F_SETOWN_EX: whom a file sends signals
_HELD_UP = (1024, 1026)  #: F_SETLEASE, F_NOTIFY: a process that opens the file waits, outside of the box too
_OWNER_IOCTLS = (0x8901, 0x8902)  #: FIOSETOWN, SIOCSPGRP: the same by ioctl
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  #: places in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_SECCOMP, _FILTER = 22, 2


def supported() -> bool:
    """Whether this machine's calls are listed here."""
    return os.uname().machine in ARCHITECTURES and struct.calcsize("P") == 8


def refuse_calls(own_pids: bool, programs: bool = True, only_itself: bool = False) -> None:
    """Refuse this process, and all that it starts, the calls of this module, for good.

    Args:
        own_pids: it has a PID namespace of its own, so that signals reach nothing else.
        programs: it may start processes.
        only_itself: it may change the priorities and limits of no other process of its PID namespace either.

    Raises:
        OSError: if the kernel has no such filters, or the architecture is unknown here.
    """
    if not supported():
        raise OSError(errno.ENOSYS, f"the system calls of {os.uname().machine} are not known here")
    program = filter_program(os.uname().machine, own_pids, programs, only_itself)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    words = (ctypes.c_ulong(_FILTER), ctypes.c_ulong(ctypes.addressof(buffer)), 0, 0)
    check(libc.prctl(_SET_SECCOMP, *words), "refusing system calls")


def filter_program(machine: str, own_pids: bool, programs: bool, only_itself: bool = False) -> bytes:
    """The filter's instructions for a machine of ARCHITECTURES."""
    refused = REFUSED | ({} if own_pids else SIGNALS) | ({} if programs else PROGRAMS)
    which = _MACHINES.index(machine)
    lines = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, ARCHITECTURES[machine], 1, 0), _step(_RETURN, _KILL)]
    lines += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    lines += [_step(_AT_LEAST, _NEWEST + 1, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    for numbers in refused.values():
        lines += _refuse(numbers[which], errno.EPERM)
    lines += _refuse(_CLONE3[which], errno.ENOSYS)
    lines += _refuse_where(_CLONE[which], 0, [(_SET, _NAMESPACES)])
    lines += _refuse_where(_PRCTL[which], 0, [(_EQUAL, _PARENT_DEATH)])
    if not programs:
        lines += _refuse_unless(_CLONE[which], 0, (_SET, _THREAD))
    typing = _TYPING if own_pids else (*_TYPING, *_OWNER_IOCTLS)
    lines += _refuse_where(_IOCTL[which], 1, [(_EQUAL, request) for request in typing])
    lines += _refuse_where(_FCNTL[which], 1, [(_EQUAL, command) for command in _HELD_UP])
    if only_itself and own_pids:
        lines += _refuse(SIGNALS["ioprio_set"][which], errno.EPERM)
    if not own_pids:
        lines += _refuse_where(_FCNTL[which], 1, [(_EQUAL, command) for command in _OWNERS])
    if not own_pids or only_itself:
        lines += _refuse_unless(_SETPRIORITY[which], 1, (_EQUAL, 0))
        for numbers in ITSELF.values():
            lines += _refuse_unless(numbers[which], 0, (_EQUAL, 0))
    return b"".join([*lines, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    """One struct sock_filter.

    Args:
        true, false: how many instructions are left out if it holds, or does not.
    """
    return struct.pack("=HBBI", code, true, false, value)


def _refuse(number: int, error: int) -> list[bytes]:
    """Refuse a call whatever its arguments; the call's number is loaded."""
    if number < 0:
        return []
    return [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERROR | error)]


def _argument(place: int) -> bytes:
    """Load the lower half of an argument, which is all that the kernel reads of these."""
    return _step(_LOAD, 16 + 8 * place)


def _refuse_where(number: int, place: int, tests: Iterable[tuple[int, int]]) -> list[bytes]:
    """Refuse a call if one of the tests holds for its argument number `place`."""
    inner = [_argument(place)]
    for code, value in tests:
        inner += [_step(code, value, 0, 1), _step(_RETURN, _ERROR | errno.EPERM)]
    inner.append(_step(_LOAD, _NUMBER))
    return [_step(_EQUAL, number, 0, len(inner)), *inner]


def _refuse_unless(number: int, place: int, test: tuple[int, int]) -> list[bytes]:
    """Refuse a call unless the test holds for its argument number `place`."""
    code, value = test
    inner = [_argument(place), _step(code, value, 1, 0), _step(_RETURN, _ERROR | errno.EPERM), _step(_LOAD, _NUMBER)]
    return [_step(_EQUAL, number, 0, len(inner)), *inner]
