"""Hosts whose hardware broke: found by what their processes and their kernels say, left out at later starts.

Invariants: a host is called broken only for words by which a driver or CUDA says that its hardware is, and only one of
the plan's; what has failed for a reason of its own, such as a user's function, is not blamed on hardware; only what was
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
RECENT = 600.0  #: seconds before a failure in which the kernel's words are taken for its cause
#: errors behind which broken hardware of another rank or host may be: an end by a signal, a peer that is gone, a GPU
MAY_BE_HARDWARE = re.compile(
    r"\bSIG[A-Z]+|signal|CUDA|NCCL|gloo|peer|connection|sign of life|has died|was lost|time[d ]*out|within \d+ s"
    r"|before the run was over",
    re.IGNORECASE,
)
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
    since = max(since - 1.0, time.monotonic() - RECENT)
    new = [line for line in lines if (at := re.match(r"\[ *([\d.]+)\]", line)) and float(at[1]) >= since]
    if log and (said := hardware_words("\n".join(new))):
        with contextlib.suppress(OSError), open_append(log) as out:
            out.write(f"hpcrl: the kernel says: {said}\n".encode())


def find_broken_host(rundir: RunDir, plan: Plan) -> tuple[str, str] | None:
    """(host, what was seen) if anything of the attempt that failed tells of broken hardware.

    The role that failed first is asked first: its error, and the end of its log.  Then, where that error is none of the
    role's own, every other trainer's and engine's log: under torchrun the ranks of a host share one, and a rank may
    have missed its peer before the peer's own host said why.
    """
    failure = rundir.failure()
    if failure is None:
        return None
    host = _host_of(failure.role, failure.index, plan)
    if host and (said := hardware_words(failure.message)):
        return host, said
    others = failure.role != "rollout" and MAY_BE_HARDWARE.search(failure.message)
    for name, where, text in _logs(rundir, plan, failure):
        if (others or name == _log_of(failure)) and where in plan.hosts and (said := hardware_words(text)):
            return where, said
    return None


def _log_of(failure: AttemptFailure) -> str:
    return f"{failure.role}-{failure.index}.log"


def _logs(rundir: RunDir, plan: Plan, failure: AttemptFailure) -> Iterator[tuple[str, str, str]]:
    """(name, host, what the attempt has written at the end) of every role's log, that of the failed role first."""
    first = _log_of(failure)
    names = [name for name in listed(rundir.logs) if LOG.fullmatch(name)]
    for name in sorted(names, key=lambda name: (name != first, name)):
        host, lines = _of_attempt(last_lines(rundir.logs / name, LOOKED_AT), rundir.attempt)
        if host is None and lines and _begun(rundir) <= (rundir.logs / name).stat().st_mtime:
            found = LOG.fullmatch(name)
            host = _host_of(found[1], int(found[2]), plan) if found and not found[3] else None
        if host:
            yield name, host, b"\n".join(lines).decode(errors="replace")


def _of_attempt(lines: list[bytes], attempt: int) -> tuple[str | None, list[bytes]]:
    """(host, lines) that an attempt wrote there last, all incarnations of an engine on one host; (None, all) without a
    heading among them, (None, []) of another attempt."""
    found = [(at, match) for at, line in enumerate(lines) if (match := HEADING.match(line))]
    if not found:
        return None, lines
    if int(found[-1][1][1]) != attempt:
        return None, []
    begin, host = found[-1][0], found[-1][1][2]
    for at, match in reversed(found):
        if match[2] != host or int(match[1]) != attempt:
            break
        begin = at
    return host.decode(errors="replace"), lines[begin:]


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
