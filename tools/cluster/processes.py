"""What runs where, read from /proc.

Invariant: a process is known by its pid namespace and its place in the tree, never by a name that somebody else may
also carry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: the cluster's own daemons
DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmdbd", "slurmd", "mariadbd"}


@dataclass(frozen=True)
class Process:
    """One live process, as seen from where this runs."""

    pid: int
    parent: int
    inner: int
    """its pid in its own pid namespace; 1 for the first process of one"""
    name: str
    argv: tuple[str, ...]


def everything() -> Iterator[Process]:
    """Every live process that can be seen (zombies are not alive)."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := _read(int(entry))) is not None:
            yield process


def _read(pid: int) -> Process | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    if status["State"].split()[0] in "ZX":
        return None
    inner = int(status["NSpid"].split()[-1])
    words = tuple(word.decode(errors="replace") for word in argv.split(b"\0")[:-1])
    return Process(pid, int(status["PPid"]), inner, status["Name"].strip(), words)


def first(module: str, *arguments: str) -> int | None:
    """Pid of the first process of a namespace that runs `python -m module arguments`; None if there is none."""
    wanted = ("-m", module, *arguments)
    for process in everything():
        if process.inner == 1 and process.argv[-len(wanted) :] == wanted:
            return process.pid
    return None


def of_namespace(leader: int) -> list[Process]:
    """Every process in the pid namespace of `leader`, not in those below it; none if it is gone."""
    try:
        namespace = os.readlink(f"/proc/{leader}/ns/pid")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [process for process in everything() if _namespace(process.pid) == namespace]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def is_own(process: Process, leader: int) -> bool:
    """Whether it belongs to the node itself: its first process, a daemon, the sshd that listens (not its sessions)."""
    return process.pid == leader or process.name in DAEMONS or (process.name == "sshd" and process.parent == leader)
