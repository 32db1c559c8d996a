"""How the hosts of a job tell one another of themselves, through a directory that they share.

Each leaves a record; the process that started them puts all records into one file as soon as the last has come
(`share_records`), and that is what each host reads.  Invariants: a file is put there whole and read once; what a host
does does not grow with the number of hosts, except the length of one listing and one file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from hpcrl.launch.probe import HostReport, host_report
from hpcrl.run.peers import PublishedRecords
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.waiting import Deadline

NAME, ALL = "all", ".records"  #: of what everybody waits for, and its ending
LATE = 10.0  #: seconds that it may take beyond the time in which the records had to come
WAIT_PER_NODE, LONGEST_WAIT = (
    0.01,
    2.0,
)  #: seconds between two looks into the directory, for each node in it, and at most
LONGEST = 1 << 20  #: bytes of a record that we read
LARGEST = 1 << 28  #: bytes of all of them


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node leaves in the directory: its report, and how many ranks it would have."""

    base: HostReport
    ranks: int = 0


def pause(expect: int) -> float:
    """Seconds between two looks into a directory that `expect` nodes share: together they make some 100 calls a
    second."""
    return min(max(WAIT_PER_NODE * expect, 0.05), LONGEST_WAIT)


def leave_record(directory: Path, host: str, ranks: int, base: HostReport | None = None) -> None:
    """Tell the other hosts of this one."""
    record = NodeRecord(base or host_report(host), ranks)
    write_atomic(directory / f"{host}.json", msgspec.json.encode(record), 0o600)


def share_records(directory: Path, expect: int, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
    """Once `expect` records are there, or `seconds` have passed, or it is `over`: all records that are there, in one
    file."""
    records = PublishedRecords(directory, NodeRecord, most=LONGEST).wait(expect, Deadline(seconds), pause(expect), over)
    with contextlib.suppress(OSError):  # then the hosts find nothing, and say so
        write_atomic(directory / f"{NAME}{ALL}", msgspec.json.encode(records), 0o600)


def all_records(directory: Path, expect: int, seconds: float) -> dict[str, NodeRecord]:
    """What `share_records` has put there, by host, as soon as it is; none if that takes more than `seconds` and
    LATE."""
    shared = PublishedRecords(directory, dict[str, NodeRecord], ALL, LARGEST)
    return shared.wait(1, Deadline(seconds + LATE), pause(expect)).get(NAME, {})
