"""What the kernel says of memory that ran out: the limit of our cgroup, and whether it has killed a process there.

Invariant: only what the kernel's files say; where they say nothing, so does this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30
UNLIMITED = 1 << 60  #: bytes: above this a limit of cgroup version 1 is none


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
