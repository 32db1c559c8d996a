"""What `hpcrl doctor` looks at, a file for each subject.

Invariant: what is found is told, never raised: a check that cannot be made is a finding too, with its reason.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.  host: where it was seen, "" for the run as a whole; hint: what to do, "" where all is well."""

    level: Level
    host: str
    what: str
    hint: str = ""

    def line(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{self.level:4}  {where}{self.what}" + (f"; {self.hint}" if self.hint else "")


class Answer(NamedTuple):
    """What a command said.  code: exit status; None if it could not be started or did not end in time (text tells)."""

    code: int | None
    text: str


def ask(command: Sequence[str], seconds: float, stdin: str = "") -> Answer:
    """Run a command for at most `seconds`; its stdout if it succeeds, else stdout and stderr."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {seconds:.0f} s")
    except OSError as error:
        return Answer(None, f"cannot be started: {error.strerror}")
    return Answer(done.returncode, done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}".strip())


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
