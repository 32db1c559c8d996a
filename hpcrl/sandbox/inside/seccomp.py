"""System calls that a box is refused, as a filter that the kernel runs (seccomp with classic BPF).

Only calls that no text tool and no computation needs: those for administrators, debuggers and keyrings, those that make
namespaces and mounts, sockets, memory that is in no process and that no limit counts, ioctls that type into a terminal,
changes of other processes' priorities and limits, and all that are newer than this list.

Invariant: a call of another architecture's numbering, which would be read wrongly here, ends the process; an
architecture whose numbers are not listed is refused altogether.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from hpcrl.sandbox.inside.kernel import check, libc

#: AUDIT_ARCH_*, linux/audit.h
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: calls with their numbers on each of these; -1: it is not there
_REFUSED = """
acct 163 89  add_key 248 217  adjtimex 159 171  bpf 321 280  chroot 161 51  clock_adjtime 305 266
clock_settime 227 112  delete_module 176 106  fanotify_init 300 262  finit_module 313 273  fsconfig 431 431
fsmount 432 432  fsopen 430 430  fspick 433 433  init_module 175 105  inotify_init 253 -1  inotify_init1 294 26
io_setup 206 0  io_uring_enter 426 426  io_uring_register 427 427  io_uring_setup 425 425  ioperm 173 -1
iopl 172 -1  ioprio_set 251 30  kcmp 312 272  kexec_file_load 320 294  kexec_load 246 104  keyctl 250 219
lookup_dcookie 212 18  memfd_create 319 279  memfd_secret 447 447  migrate_pages 256 238  modify_ldt 154 -1
mount 165 40  mount_setattr 442 442  move_mount 429 429  move_pages 279 239  mq_open 240 180  msgget 68 186
name_to_handle_at 303 264  open_by_handle_at 304 265  open_tree 428 428  perf_event_open 298 241  personality 135 92
pidfd_getfd 438 438  pivot_root 155 41  process_madvise 440 440  process_mrelease 448 448  process_vm_readv 310 270
process_vm_writev 311 271  ptrace 101 117  quotactl 179 60  quotactl_fd 443 443  reboot 169 142  request_key 249 218
semget 64 190  setdomainname 171 162  sethostname 170 161  setns 308 268  settimeofday 164 170  shmget 29 194
socket 41 198  swapoff 168 225  swapon 167 224  syslog 103 116  umount2 166 39  unshare 272 97  userfaultfd 323 282
vhangup 153 58  vmsplice 278 75
"""
#: the same of calls whose first argument must be 0: this process itself
_ITSELF = """
prlimit64 302 261  sched_setaffinity 203 122  sched_setattr 314 274  sched_setparam 142 118
sched_setscheduler 144 119
"""
#: call -> (its numbers, the place of an argument, the test, values that it is refused with)
_BITS, _IS = 0x45, 0x15
_ARGUMENTS = {
    "clone, a namespace": ((56, 220), 0, _BITS, (0x7E020000,)),
    "prctl, not to end with its parent": ((157, 167), 0, _IS, (1,)),
    "ioctl, typing: TIOCSTI, TIOCLINUX, TIOCSETD": ((16, 29), 1, _IS, (0x5412, 0x541C, 0x5423)),
    "fcntl, holding others up: F_SETLEASE, F_NOTIFY": ((72, 25), 1, _IS, (1024, 1026)),
}
_SETPRIORITY, _CLONE3 = (141, 140), (435, 435)
_NEWEST = 461  #: later calls have the same numbers everywhere; of what they do nothing is known here
_X32 = 0x40000000
_LOAD, _AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  #: places in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_SECCOMP, _FILTER = 22, 2


def calls_of(table: str) -> dict[str, tuple[int, int]]:
    """call -> its numbers, of one of the tables above."""
    words = table.split()
    return {name: (int(x86), int(arm)) for name, x86, arm in zip(words[::3], words[1::3], words[2::3], strict=True)}


REFUSED, ITSELF = calls_of(_REFUSED), calls_of(_ITSELF)


def filter_program(machine: str) -> bytes:
    """The filter's instructions for a machine of ARCHITECTURES."""
    which = list(ARCHITECTURES).index(machine)
    lines = [_step(_LOAD, _ARCHITECTURE), _step(_IS, ARCHITECTURES[machine], 1), _step(_RETURN, _KILL)]
    lines += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    lines += [_step(_AT_LEAST, _NEWEST + 1, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    numbers = [found[which] for found in REFUSED.values() if found[which] >= 0]
    for number, error in (*((number, errno.EPERM) for number in numbers), (_CLONE3[which], errno.ENOSYS)):
        lines += [_step(_IS, number, 0, 1), _step(_RETURN, _ERROR | error)]
    refuse, again = _step(_RETURN, _ERROR | errno.EPERM), _step(_LOAD, _NUMBER)
    for found, place, test, values in _ARGUMENTS.values():
        inner = [_step(_LOAD, _FIRST + 8 * place)]  # the lower half, which is all that the kernel reads of these
        for value in values:
            inner += [_step(test, value, 0, 1), refuse]
        lines += [_step(_IS, found[which], 0, len(inner) + 1), *inner, again]
    for found, place in (*((found, 0) for found in ITSELF.values()), (_SETPRIORITY, 1)):
        lines += [_step(_IS, found[which], 0, 4), _step(_LOAD, _FIRST + 8 * place), _step(_IS, 0, 1), refuse, again]
    return b"".join([*lines, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    """One struct sock_filter.

    Args:
        true, false: how many instructions are left out if it holds, or does not.
    """
    return struct.pack("=HBBI", code, true, false, value)


def refuse_calls() -> None:
    """Refuse this process, and all that it starts, the calls of this module, for good.

    Raises:
        OSError: if the kernel has no such filters, or the architecture is unknown here.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known here")
    program = filter_program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    words = (ctypes.c_ulong(_FILTER), ctypes.c_ulong(ctypes.addressof(buffer)), 0, 0)
    check(libc.prctl(_SET_SECCOMP, *words), "refusing system calls")
