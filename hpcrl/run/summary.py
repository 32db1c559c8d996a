"""STAGE/summary.json, the trainer's last word on a stage: whether it is finished, and how far it was.

Invariant: written once, whole, by trainer rank 0 at the end of an attempt; an older attempt's word does not count for a
later one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.run.rundir import OVER, RunDir, listed, read_record, write_atomic
from hpcrl.utils.untrusted_files import touch

SUMMARY = "summary.json"  #: its name in a stage's directory


class Summary(msgspec.Struct, frozen=True):
    """What it holds.

    Attributes:
        rollout_id: rollouts that are done, out of `total`.
        policy_version: optimizer steps.
        seconds: of this attempt.
    """

    status: Literal["finished", "stopped"]
    attempt: int
    rollout_id: int = 0
    total: int = 0
    policy_version: int = 0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the stage has run to its end; else it was stopped and has saved."""
        return self.status == "finished"


def write_summary(directory: Path, summary: Summary) -> None:
    """Write it into a stage's directory, then the mark by which its hosts know.

    Raises:
        HpcrlError: if that cannot be written.
    """
    write_atomic(directory / SUMMARY, msgspec.json.encode(summary))
    here = RunDir(directory, summary.attempt).here
    if here.is_dir():
        touch(here / OVER)


def read_summary(directory: Path) -> Summary | None:
    """What the last attempt of a stage that came to its end has left, or None.

    Raises:
        HpcrlError: names a damaged file.
    """
    return read_record(directory / SUMMARY, Summary, "remove it, and the stage resumes from its last checkpoint")


def summary_of(rundir: RunDir) -> Summary | None:
    """What this attempt has left, or None: an older attempt's summary does not count.

    For a process that waits for it: the directory is read first, since a network file system remembers for a minute
    that a file was absent.
    """
    if SUMMARY not in listed(rundir.root):
        return None
    found = read_summary(rundir.root)
    return found if found is not None and found.attempt == rundir.attempt else None
