"""What the filter of system calls is made of, read as the kernel reads it; what it does is in `test_attacks.py`."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hpcrl.sandbox.inside import seccomp

HEADERS = Path("/usr/include/asm-generic/unistd.h"), Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


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
    program = seccomp.filter_program(machine)
    assert len(program) // 8 < 256

    def answer(number: int, *arguments: int, arch: int = arch) -> int:
        return run_filter(program, arch, number, arguments)

    for name, numbers in seccomp.REFUSED.items():
        assert numbers[which] < 0 or answer(numbers[which]) == EPERM, name
    for numbers in seccomp.ITSELF.values():
        assert (answer(numbers[which], 0), answer(numbers[which], 1)) == (ALLOW, EPERM)
    setpriority, kill, clone, ioctl, fcntl, prctl = ((141, 62, 56, 16, 72, 157), (140, 129, 220, 29, 25, 167))[which]
    assert (answer(setpriority, 0, 0), answer(setpriority, 0, 1)) == (ALLOW, EPERM)
    assert answer(kill, 1) == answer(clone, 17) == answer(clone, 0x3D0F00) == ALLOW
    assert answer(clone, 0x10000011) == EPERM
    assert answer(435) == answer(467) == ENOSYS
    assert (answer(prctl, 1, 0), answer(prctl, 15, 0)) == (EPERM, ALLOW)
    assert answer(ioctl, 0, 0x700005412) == EPERM and answer(ioctl, 0, 0x5401) == ALLOW
    assert (answer(fcntl, 3, 1024), answer(fcntl, 3, 4)) == (EPERM, ALLOW)
    assert answer(0, arch=arch ^ 1) == KILL and answer(0x40000001) == KILL


@pytest.mark.skipif(not all(path.exists() for path in HEADERS), reason="the kernel's headers are not here")
def test_numbers_are_those_of_the_kernel() -> None:
    for which, path in ((1, HEADERS[0]), (0, HEADERS[1])):
        lines = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
        known = {words[1].split("_", 3)[-1] if "NR3264" in words[1] else words[1][5:]: words[2] for words in lines}
        known = {name.removeprefix("_"): number for name, number in known.items()}
        for name, numbers in (
            *seccomp.REFUSED.items(),
            *seccomp.ITSELF.items(),
        ):
            assert str(numbers[which]) == known.get(name, str(numbers[which])), name
