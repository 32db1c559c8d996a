"""The transcript of a sample as text: what the policy wrote and was told, turn by turn, and what it did in sandboxes.

Invariant: pure; whatever a file holds in a transcript's place, there are the turns that can be read of it, and of a
sample without any its response as the one turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hpcrl.report.run_status import span
from hpcrl.report.sample_records import Look, Record
from hpcrl.report.sample_view import Line, as_text, field_lines, head_lines

POLICY, TOLD, SANDBOXES = "the policy", "told", "in sandboxes"
STYLES = {POLICY: "", TOLD: "cyan", SANDBOXES: "dim"}


class _Command(msgspec.Struct):
    """As the rollout process writes it (`rollout/samplers/transcript.py`)."""

    box: int = 1
    at: float = 0.0
    command: str = ""
    code: int | None = None
    seconds: float = 0.0
    limits: list[str] = []

    def __str__(self) -> str:
        """What came of it, in a line."""
        came = "no exit status" if self.code is None else f"exit {self.code}"
        limits = f", at its limit of {', '.join(self.limits)}" if self.limits else ""
        return f"{self.at:9.3f} s  box {self.box}  {came}{limits}, {span(self.seconds)}: {self.command}"


class _Transcript(msgspec.Struct):
    turns: list[tuple[int, int | str]] = []
    commands: list[_Command] = []
    left_out: int = 0


def parts(record: Record) -> list[tuple[str, str]]:
    """(POLICY, TOLD or SANDBOXES; its text) in order: every turn, then a line for every command."""
    try:
        found = msgspec.convert(record.transcript, _Transcript, strict=False)
    except msgspec.ValidationError:
        found = _Transcript()
    several = list(_turns(record, found.turns)) or [(POLICY, record.response)]
    lines = [str(command) for command in found.commands]
    if found.left_out:
        lines.insert(len(lines) // 2, f"... {found.left_out} commands are not kept ...")
    return [*several, (SANDBOXES, "\n".join(lines))] if lines else several


def _turns(record: Record, turns: list[tuple[int, int | str]]) -> Iterator[tuple[str, str]]:
    at = 0
    for own, what in turns:
        name = POLICY if own else TOLD
        if isinstance(what, str):
            yield name, what
        else:
            yield name, record.response[at : at + max(what, 0)]
            at += max(what, 0)


def transcript_lines(look: Look, title: str) -> Iterator[Line]:
    """A sample with its turns."""
    yield from head_lines(look.record, look.trained, title)
    yield from field_lines("prompt", as_text(look.record.prompt))
    if look.record.label is not None:
        yield from field_lines("label", as_text(look.record.label))
    for name, text in parts(look.record):
        yield from field_lines(name, text, STYLES[name])
    yield ()
