"""A process that confines itself: what is left to it, and what the kernel's filter is made of."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.sandbox import seccomp
from tests.support.able import needs

linux = needs("namespaces")
HEADERS = Path("/usr/include/asm-generic/unistd.h"), Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def confined(code: str) -> subprocess.CompletedProcess[str]:
    """What a process says that has confined itself; `code` runs afterwards."""
    text = (
        "import os, sys, threading\nfrom hpcrl.sandbox.confine import confine\n"
        f"from hpcrl.sandbox.private_root import View\nconfine(View())\n{code}"
    )
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.process
@linux
def test_what_a_confined_process_keeps() -> None:
    """It computes, has threads and /tmp, and speaks through what it had open."""
    code = (
        "import tempfile\nfound = []\nthread = threading.Thread(target=found.append, args=[1])\nthread.start()\n"
        "thread.join(9)\nopen('/tmp/x', 'w').write('y')\nprint(found, os.listdir('/tmp'), os.getuid())"
    )
    done = confined(code)
    assert done.stdout.startswith("[1] ['x'] "), done.stderr


@pytest.mark.process
@linux
@pytest.mark.parametrize(
    "code",
    [
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.kill(os.getpid(), 0)",
        "os.listdir('/home')[0]",
        "open('/proc/self/status')",
        "b'x' * (1 << 26) and open('/tmp/x', 'wb').write(b'x' * (65 << 20))",
    ],
)
def test_what_a_confined_process_has_lost(code: str) -> None:
    done = confined(code + "\nprint('done')")
    assert done.returncode and "done" not in done.stdout and "Error" in done.stderr, done


def run_filter(program: bytes, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: an interpreter of the few instructions that there are."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *([0] * (6 - len(arguments))))
    place = value = 0
    while True:
        code, true, false, k = struct.unpack_from("=HBBI", program, place * 8)
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            place += true if holds else false


ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter(machine: str) -> None:
    """Each listed call is refused, other numberings end the process, and what computing needs is allowed."""
    which = list(seccomp.ARCHITECTURES).index(machine)
    arch = seccomp.ARCHITECTURES[machine]
    closed = seccomp.filter_program(machine, own_pids=False, programs=False)
    free = seccomp.filter_program(machine, own_pids=True, programs=True)
    for numbers in seccomp.REFUSED.values():
        if numbers[which] >= 0:
            assert {run_filter(found, arch, numbers[which]) for found in (closed, free)} == {EPERM}
    for numbers in (seccomp.SIGNALS | seccomp.PROGRAMS).values():
        if numbers[which] >= 0:
            assert run_filter(closed, arch, numbers[which]) == EPERM
            assert run_filter(free, arch, numbers[which]) == ALLOW
    for numbers in seccomp.ITSELF.values():
        assert run_filter(closed, arch, numbers[which], (0,)) == ALLOW
        assert run_filter(closed, arch, numbers[which], (7,)) == EPERM
    shared = seccomp.filter_program(machine, own_pids=True, programs=True, only_itself=True)
    for numbers in seccomp.ITSELF.values():
        assert run_filter(shared, arch, numbers[which], (0,)) == ALLOW
        assert run_filter(shared, arch, numbers[which], (1,)) == EPERM
        assert run_filter(free, arch, numbers[which], (1,)) == ALLOW
    assert run_filter(shared, arch, (141, 140)[which], (0, 1)) == EPERM
    assert run_filter(shared, arch, seccomp.SIGNALS["kill"][which], (1,)) == ALLOW
    clone, ioctl, fcntl = ((56, 16, 72), (220, 29, 25))[which]
    assert run_filter(free, arch, clone, (17,)) == ALLOW
    assert run_filter(closed, arch, clone, (17,)) == EPERM
    assert run_filter(closed, arch, clone, (0x3D0F00,)) == ALLOW  # a thread
    assert run_filter(free, arch, clone, (0x10000011,)) == EPERM
    assert run_filter(free, arch, 435) == ENOSYS and run_filter(free, arch, 467) == ENOSYS
    assert run_filter(free, arch, (157, 167)[which], (1, 0)) == EPERM
    assert run_filter(free, arch, (157, 167)[which], (15, 0)) == ALLOW
    assert run_filter(free, arch, ioctl, (0, 0x700005412)) == EPERM
    assert run_filter(free, arch, ioctl, (0, 0x5401)) == ALLOW
    assert run_filter(closed, arch, fcntl, (3, 8)) == EPERM and run_filter(closed, arch, fcntl, (3, 4)) == ALLOW
    assert run_filter(free, arch ^ 1, 0) == KILL
    assert run_filter(free, arch, 0x40000001) == KILL


@pytest.mark.skipif(not all(path.exists() for path in HEADERS), reason="the kernel's headers are not here")
def test_numbers_are_those_of_the_kernel() -> None:
    for which, path in ((1, HEADERS[0]), (0, HEADERS[1])):
        lines = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
        known = {words[1].split("_", 3)[-1] if "NR3264" in words[1] else words[1][5:]: words[2] for words in lines}
        known = {name.removeprefix("_"): number for name, number in known.items()}
        for name, numbers in (
            *seccomp.REFUSED.items(),
            *seccomp.SIGNALS.items(),
            *seccomp.ITSELF.items(),
            *seccomp.PROGRAMS.items(),
        ):
            assert str(numbers[which]) == known.get(name, str(numbers[which])), name
