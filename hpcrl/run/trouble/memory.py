"""Whether the kernel has killed a process for want of memory, and whose limit it was.

    watch = MemoryWatch()          # before it is started
    watch.said()                   # -> "the kernel killed 1 process for want of memory at the limit of 8.0 GiB (memory.max of job_7): ask for more memory"

A process that was killed so ends with SIGKILL, as one that somebody has killed.  The kernel counts what it does: for
each cgroup (memory.events of version 2, memory.oom_control of version 1) and for the whole host (oom_kill of
/proc/vmstat).
Invariant: what cannot be read is not guessed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
UNLIMITED = 1 << 60  #: bytes; version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class _Group:
    """A cgroup above this process.  events: the file of its count; limit: that of its limit."""

    name: str
    events: Path
    limit: Path


class MemoryWatch:
    """The counts as they are now, of this process's cgroups and of its host.  root: where /proc and /sys are."""

    def __init__(self, root: Path = Path("/"), ever: bool = False) -> None:
        """ever: count what the cgroups have seen before as well."""
        self._groups = _groups(root)
        self._host = root / "proc/vmstat"
        self._before = [0 if ever else _field(group.events, "oom_kill") for group in self._groups]
        self._host_before = _field(self._host, "oom_kill")

    def said(self) -> str:
        """What the kernel has killed since, for a user; "" if nothing, or if that cannot be found out.

        The host's count alone does not say whose process it was: another job's limit may have been hit.
        """
        for number, (group, before) in enumerate(
            zip(self._groups, self._before, strict=True)
        ):  # our own first, the outermost last
            now = _field(group.events, "oom_kill")
            if now is not None and before is not None and now > before:
                return f"the kernel killed {_many(now - before)} for want of memory{self._limit(number)}: ask for more memory"
        now = _field(self._host, "oom_kill")
        if now is not None and self._host_before is not None and now > self._host_before:
            return f"perhaps for want of memory: the kernel has killed {_many(now - self._host_before)} of this host meanwhile"
        return ""

    def _limit(self, number: int) -> str:
        """The least limit of a cgroup and those above it, in words; "" if they have none, or it is not seen."""
        limits = [(limit, group) for group in self._groups[number:] if (limit := _number(group.limit)) is not None]
        limit, group = min(limits, key=lambda one: one[0], default=(UNLIMITED, None))
        return (
            f" at the limit of {limit / GIB:.1f} GiB ({group.limit.name} of {group.name})"
            if group and limit < UNLIMITED
            else ""
        )

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
                top = root / "sys/fs/cgroup"
                events = "memory.events"
                limit = "memory.max"
            elif "memory" in controllers.split(","):
                top = root / "sys/fs/cgroup/memory"
                events = "memory.oom_control"
                limit = "memory.limit_in_bytes"
            else:
                continue
            here = top / path.lstrip("/")
            while here != top.parent:
                found.append(
                    _Group(here.name if here != top else "the host's root cgroup", here / events, here / limit)
                )
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
