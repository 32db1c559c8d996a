"""What a box may use.

Invariant: every amount has a bound, and one that could not hold is refused before anything is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import resource
from dataclasses import dataclass

from hpcrl.errors import UsageError
from hpcrl.sandbox.inside.frames import TRANSFER

_LEAST = {"disk": 1 << 20, "files": 16, "inodes": 64, "memory": 32 << 20, "processes": 2}
_MOST = 1 << 42
_BESIDES = 16 << 20  #: bytes of memory that are not the disk's


@dataclass(frozen=True)
class BoxLimits:
    """What all processes of a box may use together, where nothing else is said.

    Attributes:
        memory: bytes that its processes and its disk, which is memory, hold.
        processes: that there may be at once.
        seconds: that a command may take, unless it is given others.
        cpu: seconds of processor time of each process.
        disk: bytes of all that is written, /tmp included.
        inodes: files and directories that are written.
        output: bytes that are kept of each of a command's two outputs.
        files: that each process may have open.

    Raises:
        UsageError: if one is too small to work with, or the disk is not smaller than the memory that it is part of.
    """

    memory: int = 1 << 30
    processes: int = 128
    seconds: float = 60.0
    cpu: int = 120
    disk: int = 256 << 20
    inodes: int = 16384
    output: int = 1 << 20
    files: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = _LEAST.get(field.name, 1)
            if field.name != "seconds" and (not isinstance(value, int) or not least <= value <= _MOST):
                raise UsageError(
                    f"BoxLimits({field.name}={value!r})", f"give a whole number from {least:,} to {_MOST:,}"
                )
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"BoxLimits(seconds={self.seconds!r})", "give a positive number of seconds")
        if self.disk + _BESIDES > self.memory:  # a full disk must leave room for what empties it
            raise UsageError(
                f"BoxLimits(disk={self.disk:,}, memory={self.memory:,})",
                f"the disk is part of the memory: give it {_BESIDES:,} bytes less, or more memory",
            )
        if self.output > TRANSFER // 2:
            raise UsageError(f"BoxLimits(output={self.output:,})", f"give {TRANSFER // 2:,} bytes or fewer")

    def of_process(self) -> dict[int, int]:
        """`resource.RLIMIT_*` of each process that a command starts."""
        major, minor = map(int, re.findall(r"\d+", os.uname().release)[:2])
        # each user namespace counts for itself since Linux 5.14; before, all processes of the user: the watcher counts
        count = {resource.RLIMIT_NPROC: self.processes + 3} if (major, minor) >= (5, 14) else {}
        return count | {
            resource.RLIMIT_AS: 4 * self.memory,  # of what is reserved, most is never used
            resource.RLIMIT_CORE: 1,  # no file, and no program of the machine that a core is piped to (core(5))
            resource.RLIMIT_NICE: 0,
            resource.RLIMIT_RTPRIO: 0,
            resource.RLIMIT_CPU: self.cpu,
            resource.RLIMIT_FSIZE: self.disk,
            resource.RLIMIT_MEMLOCK: 1 << 20,
            resource.RLIMIT_NOFILE: self.files,
        }
