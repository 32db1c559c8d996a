"""What was found by looking before anything runs: one line each, for `hpcrl doctor` and for the commands that refuse a
run early.

Invariant: a finding is reported, never raised: a check that cannot be made is a finding too, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        host: where it was seen, "" for the run as a whole.
        hint: what to do, "" where all is well.
    """

    level: Level
    host: str
    what: str
    hint: str = ""

    def line(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{self.level:4}  {where}{self.what}" + (f"; {self.hint}" if self.hint else "")


def last_line(text: str) -> str:
    """The last line that says something; of a traceback, the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def failed(findings: Iterable[Finding]) -> bool:
    """Whether anything fails."""
    return any(finding.level == "fail" for finding in findings)


def size(number: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 10 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def count(number: int, noun: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
