"""Hosts whose hardware broke: found by the error of the role that failed, left out at later starts.

Invariant: a host is called broken only for words of CUDA or NVML by which its own device is, in the error with which an
attempt failed; not for what other roles, or its kernel, have written.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from hpcrl.plan import Plan
from hpcrl.run.exit_status import hardware_words
from hpcrl.run.rundir import RunDir, read_if_whole, write_atomic

BROKEN = "broken-hosts.json"  #: in a run directory: host -> what was seen there


def find_broken_host(rundir: RunDir, plan: Plan) -> tuple[str, str] | None:
    """(host, what was seen) if the role that failed first says that the hardware of its host is broken."""
    failure = rundir.failure()
    if failure is None:
        return None
    places = {"trainer": plan.trainers, "engine": plan.engines}.get(failure.role, ())
    said = hardware_words(failure.message)
    return (places[failure.index].host, said) if said and failure.index < len(places) else None


def note_broken_host(root: Path, host: str, said: str) -> None:
    """Remember it, for this run's later starts."""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    write_atomic(root / BROKEN, msgspec.json.format(msgspec.json.encode({**_broken(root), host: f"{when} {said}"})))


def broken_hosts(root: Path) -> list[str]:
    """The hosts that the run has found broken."""
    return list(_broken(root))


def _broken(root: Path) -> dict[str, str]:
    return read_if_whole(root / BROKEN, dict[str, str]) or {}
