"""Whether the kernel has killed a process for want of memory, and whose limit it was.

    watch = MemoryWatch()          # before it is started
    watch.said()                   # -> "the kernel killed 1 process for want of memory: its limit is 8.6 GB (memory.max of job_7)"

A process that was killed so ends with SIGKILL, as one that somebody has killed.  The kernel counts what it does: for each
cgroup (memory.events of version 2, memory.oom_control of version 1) and for the whole host (oom_kill of /proc/vmstat).
Invariant: what cannot be read is not guessed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  #: bytes; version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class _Group:
    """A cgroup above this process.  events: the file of its count; limit: that of its limit."""

    name: str
    events: Path
    limit: Path


class MemoryWatch:
    """The counts as they are now, of this process's cgroups and of its host.  root: where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups, self._host = _groups(root), root / "proc/vmstat"
        self._before = [self._count(group) for group in self._groups]
        self._host_before = _field(self._host, "oom_kill")

    @staticmethod
    def _count(group: _Group) -> int | None:
        return _field(group.events, "oom_kill")

    def said(self) -> str:
        """What the kernel has killed since, for a user; "" if nothing, or if that cannot be found out."""
        hit = None
        for group, before in zip(self._groups, self._before, strict=True):  # from the process's own to the outermost
            now = self._count(group)
            if now is None or before is None or now <= before:
                continue
            limit = _number(group.limit)
            if limit is not None and limit < UNLIMITED and (hit is None or limit < hit[1]):
                hit = (group, limit, now - before)
        if hit is not None:
            group, limit, count = hit
            return (
                f"the kernel killed {_many(count)} for want of memory: "
                f"the limit is {limit / 1e9:.1f} GB ({group.limit.name} of {group.name})"
            )
        now = _field(self._host, "oom_kill")
        if now is not None and self._host_before is not None and now > self._host_before:
            return f"the kernel killed {_many(now - self._host_before)} of this host for want of memory"
        return ""

    @property
    def sees(self) -> bool:
        """Whether a kill would have been seen, so that its absence says something."""
        return self._host_before is not None or any(count is not None for count in self._before)


def _many(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _groups(root: Path) -> list[_Group]:
    """The cgroups of this process with a memory controller, innermost first."""
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                top, events, limit = root / "sys/fs/cgroup", "memory.events", "memory.max"
            elif "memory" in controllers.split(","):
                top, events, limit = root / "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"
            else:
                continue
            here = top / path.lstrip("/")
            while here != top.parent:
                found.append(_Group(here.name if here != top else "the host's root cgroup", here / events, here / limit))
                here = here.parent
    return found


def _field(path: Path, name: str) -> int | None:
    """The number behind a name, in a file of lines of both."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
