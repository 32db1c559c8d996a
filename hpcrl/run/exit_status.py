"""How a process ended, in words: the one phrase for an exit status, and what the kernel says of memory that ran out.

Invariant: no status is an error here, also one that no process of ours can have; where the kernel's files say nothing, so does this.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

#: what a shell, srun or mpirun adds to the number of the signal that killed the process below it
SHELL = 128
#: who sends SIGKILL when nobody was asked: the kernel to a process, or Slurm to all of a step
_MEMORY = "memory may have run out"
GIB = 1 << 30
UNLIMITED = 1 << 60  #: bytes: above this a limit of cgroup version 1 is none


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals and unknown ones by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int) -> str:
    """ "was killed by SIGSEGV" or "ended with exit code 3", to stand behind the name of the process.

    status: as `subprocess` has it, negative for a signal.  With SIGKILL stands what the kernel says of it, or what it often means.
    """
    memory = (killed_at_limit() or _MEMORY) if status in (-signal.SIGKILL, SHELL + signal.SIGKILL) else ""
    if status < 0:
        name = signal_name(-status)
        return f"was killed by {name}" + (f" ({memory})" if memory else "")
    below = status - SHELL
    if below in set(signal.Signals):  # a process below a shell
        name = signal_name(below)
        return f"ended with exit code {status} ({name}{'; ' + memory if memory else ''})"
    return f"ended with exit code {status}"


# ---- what the kernel says


def killed_at_limit(root: Path = Path("/")) -> str:
    """In words, if the kernel has killed a process of our cgroup for want of memory; else "".

    root: where /proc and /sys/fs/cgroup are.  Version 1 counts in memory.oom_control, version 2 in memory.events.
    """
    for folder in _folders(root):
        for name in ("memory.events", "memory.oom_control"):
            if _count(folder / name):
                limit = min(filter(None, map(_limit, (folder, *folder.parents))), default=None)
                at = f" at the job's limit of {limit / GIB:.1f} GiB" if limit else ""
                return f"the kernel ended a process here for want of memory{at}: ask for more memory"
    return ""


def _folders(root: Path) -> Iterator[Path]:
    """The directories of our memory cgroup: as /proc says it, and as a container sees it."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / "sys/fs/cgroup" / controllers
                yield from (top / path.lstrip("/"), top)


def _count(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        words = dict(line.split() for line in file.read_text().splitlines())
        return int(words.get("oom_kill", 0))
    return 0


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is none
            if (limit := int((folder / name).read_text())) < UNLIMITED:
                return limit
    return None
