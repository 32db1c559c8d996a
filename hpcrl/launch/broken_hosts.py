"""Hosts whose hardware broke: found by what their processes and their kernels say, left out at later starts.

Invariants: a host is called broken only for words by which a driver or CUDA says that its hardware is; only what was
written in the attempt that failed counts, since a log holds one attempt after the other, of other hosts perhaps.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.plan import Plan
from hpcrl.report.file_tail import last_lines
from hpcrl.run.exit_status import hardware_words
from hpcrl.run.process import run_command
from hpcrl.run.rundir import AttemptFailure, RunDir, listed, write_atomic
from hpcrl.untrusted_files import Damaged, open_append, read_json

BROKEN = "broken-hosts.json"  #: in a run directory: host -> what was seen there
DMESG = 5.0  #: seconds that dmesg may take
LOOKED_AT = 200  #: lines at the end of a log
LOG = re.compile(r"(trainer|engine)-(\d+)(-node-\d+)?\.log")
#: the line with which the host's process begins a role's part of its log
HEADING = re.compile(rb"hpcrl: attempt (\d+) on (\S+), ")


def heading(attempt: int, host: str) -> bytes:
    """The line that says which attempt writes a log from there on, and on which host."""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    return f"hpcrl: attempt {attempt} on {host}, {when}\n".encode()


def note_kernel_words(log: Path | None, since: float) -> None:
    """Add to a role's log what this host's kernel has said of broken hardware since then, where it may be read.

    NVIDIA's driver writes its Xid errors there and nowhere else.

    Args:
        since: on the clock of time.monotonic(), which is the kernel's.
    """
    answer = run_command(["dmesg"], DMESG) if log and shutil.which("dmesg") else None
    lines = answer.out.splitlines() if answer and answer.code == 0 else []
    new = [line for line in lines if (at := re.match(r"\[ *([\d.]+)\]", line)) and float(at[1]) >= since - 1.0]
    if log and (said := hardware_words("\n".join(new))):
        with contextlib.suppress(OSError), open_append(log) as out:
            out.write(f"hpcrl: the kernel says: {said}\n".encode())


def find_broken_host(rundir: RunDir, plan: Plan) -> tuple[str, str] | None:
    """(host, what was seen) if anything of the attempt that failed tells of broken hardware.

    The role that failed first is asked first: its error, and the end of its log.  Then every other trainer's and
    engine's log: under torchrun the ranks of a host share one, and a rank may have missed its peer before the peer's
    own host said why.
    """
    failure = rundir.failure()
    if failure is None:
        return None
    host = _host_of(failure.role, failure.index, plan)
    if host and (said := hardware_words(failure.message)):
        return host, said
    for where, text in _logs(rundir, plan, failure):
        if said := hardware_words(text):
            return where, said
    return None


def _logs(rundir: RunDir, plan: Plan, failure: AttemptFailure) -> Iterator[tuple[str, str]]:
    """(host, what the attempt has written at the end) of every role's log, that of the failed role first."""
    first = f"{failure.role}-{failure.index}.log"
    names = [name for name in listed(rundir.logs) if LOG.fullmatch(name)]
    for name in sorted(names, key=lambda name: (name != first, name)):
        host, lines = _of_attempt(last_lines(rundir.logs / name, LOOKED_AT), rundir.attempt)
        if host is None and lines and _begun(rundir) <= (rundir.logs / name).stat().st_mtime:
            found = LOG.fullmatch(name)
            host = _host_of(found[1], int(found[2]), plan) if found and not found[3] else None
        if host:
            yield host, b"\n".join(lines).decode(errors="replace")


def _of_attempt(lines: list[bytes], attempt: int) -> tuple[str | None, list[bytes]]:
    """(host, lines) that an attempt wrote; (None, all) without a heading among them, (None, []) of another attempt."""
    for number in range(len(lines) - 1, -1, -1):
        if found := HEADING.match(lines[number]):
            own = int(found[1]) == attempt
            return (found[2].decode(errors="replace"), lines[number + 1 :]) if own else (None, [])
    return None, lines


def _begun(rundir: RunDir) -> float:
    """When the attempt's plan was made, in Unix seconds; for ever in the future if that is not known."""
    with contextlib.suppress(OSError):
        return rundir.plan_file.stat().st_mtime
    return float("inf")


def _host_of(role: str, index: int, plan: Plan) -> str | None:
    places = {"trainer": plan.trainers, "engine": plan.engines}.get(role, ())
    return places[index].host if index < len(places) else None


def note_broken_host(root: Path, host: str, said: str) -> None:
    """Remember it, for this run's later starts."""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    write_atomic(root / BROKEN, msgspec.json.format(msgspec.json.encode({**_broken(root), host: f"{when} {said}"})))


def broken_hosts(root: Path) -> list[str]:
    """The hosts that the run has found broken."""
    return list(_broken(root))


def _broken(root: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, Damaged):
        return read_json(root / BROKEN, dict[str, str])
    return {}
