"""From the start of a job to the first trained token: which role did what meanwhile, and what took longest.  Pure:
tracks in, rows out.

Invariants: every row is read from the timelines and none is estimated; a run of an hpcrl that did not record a phase
has no row of it; times of waiting for another role have a row, and are never what took longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcrl.report.timeline.reading import Span, Track
from hpcrl.report.timeline.run_spending import Recorded
from hpcrl.report.timeline.spans import (
    BEGINS,
    BUILD,
    CONFIGURE,
    ENGINES,
    IMPORT,
    LOAD,
    MAKE,
    MEET,
    OTHERS,
    PREPARE,
    PROFILE,
    READ,
    SECOND,
    START,
    TRAIN,
    UNPACK,
    UPDATE,
    WAIT,
    WARM_UP,
)

#: role -> the spans of its start, in their order; of those in FIRST the first alone counts
PHASES: dict[str, tuple[str, ...]] = {
    "launcher": (PREPARE,),
    "engine": (UNPACK, IMPORT, CONFIGURE, LOAD, PROFILE, WARM_UP, START),
    "rollout": (IMPORT, START, MAKE),
    "trainer": (IMPORT, MEET, BUILD, READ, OTHERS, ENGINES, START, UPDATE, WAIT, TRAIN),
}
FIRST = {
    MAKE: "make the first rollout",
    UPDATE: "first weight update",
    WAIT: "wait for the first samples",
    TRAIN: "train the first step",
}
WAITING = (MEET, ENGINES, WAIT)  #: for others
WHOLE = (START,)  #: made up of other phases
ROLES = "before the roles"  #: from the attempt's begin until its first role exists


class PhaseRow(NamedTuple):
    """A phase of one role's start.

    Attributes:
        begin, end: seconds since the job's start, of the first process of the role that began it, and of the last that
            ended it.
        seconds: of the process that took longest.
        who: that process.
        waits: for others, or the sum of other rows.
    """

    role: str
    name: str
    begin: float
    end: float
    seconds: float
    who: str
    waits: bool


class Startup(NamedTuple):
    """The start of an attempt.

    Attributes:
        seconds: from the job's start to the first trained step.
        rows: in the order of roles and of time.
        longest: None if no phase was recorded.
    """

    attempt: int
    seconds: float
    rows: list[PhaseRow]
    longest: PhaseRow | None


def startup(recorded: Recorded) -> Startup | None:
    """Of the last attempt that came to its first trained step; None if none did."""
    for tracks in reversed(list(recorded.stages.values())):
        drivers = [track for track in tracks if track.role == "trainer" and track.header.index == 0]
        for driver in sorted(drivers, key=lambda track: -track.begin):
            if trained := driver.named(TRAIN)[:1]:
                own = [track for track in tracks if track.attempt == driver.attempt]
                return _of(recorded.launchers, own, driver.attempt or 0, driver.begin, trained[0].end)
    return None


def _of(launchers: Sequence[Track], tracks: Sequence[Track], attempt: int, known: int, end: int) -> Startup:
    """Of one attempt.

    Args:
        known: a moment of it.
        end: of its first trained step.
    """
    earlier = [track for track in launchers if track.begin <= known]
    launcher = max(earlier, key=lambda track: track.begin, default=None)
    marks = [mark for mark in launcher.named(BEGINS) if mark.begin <= known] if launcher else []
    first = len(marks) < 2  # a job's later attempts begin without the job
    zero = launcher.begin if launcher and first else marks[-1].begin if marks else min(t.begin for t in tracks)
    rows = []
    made = min((span.begin for track in tracks for span in track.named(START)), default=0)
    if marks and made:  # a process's age is known to a second
        before = Span(ROLES, marks[-1].begin, max(marks[-1].begin, made), {})
        rows.append(_row("launcher", ROLES, [("launcher", before)], zero))
    shown = [*tracks, *([launcher] if launcher and first else [])]
    for role, names in PHASES.items():
        for name in names:
            if found := list(_spans(shown, role, name, zero, end)):
                rows.append(_row(role, name, found, zero))
    order = list(PHASES)
    rows.sort(key=lambda row: (order.index(row.role), row.begin, row.end))
    longest = max((row for row in rows if not row.waits), key=lambda row: row.seconds, default=None)
    return Startup(attempt, (end - zero) / SECOND, rows, longest)


def _spans(tracks: Sequence[Track], role: str, name: str, zero: int, end: int) -> Iterator[tuple[str, Span]]:
    """(process, span) of a phase, at most one of each process, that was over when the first step had been trained."""
    for track in tracks:
        if track.role == role:
            here = [span for span in track.named(name) if zero - SECOND <= span.begin and span.end <= end]
            yield from ((track.name, span) for span in here[:1])


def _row(role: str, name: str, found: Sequence[tuple[str, Span]], zero: int) -> PhaseRow:
    who, longest = max(found, key=lambda one: one[1].end - one[1].begin)
    return PhaseRow(
        role,
        FIRST.get(name, name),
        max(0.0, (min(span.begin for _, span in found) - zero) / SECOND),
        (max(span.end for _, span in found) - zero) / SECOND,
        (longest.end - longest.begin) / SECOND,
        who,
        name in (*WAITING, *WHOLE),
    )


# ---- shown


def headline(found: Startup) -> str:
    """What it came to, and what took longest."""
    text = f"from the start of the job to the first trained step: {found.seconds:.1f} s"
    if found.attempt:
        text = f"{text} (attempt {found.attempt})"
    if found.longest is None:
        return text
    return f"{text}; longest: {found.longest.name} of {found.longest.who}, {found.longest.seconds:.1f} s"


def cells(found: Startup) -> list[tuple[str, ...]]:
    """A row a phase: role, phase, from, to, seconds, process."""
    return [
        (row.role, row.name, f"{row.begin:.1f}", f"{row.end:.1f}", f"{row.seconds:.1f}", row.who) for row in found.rows
    ]


def text(found: Startup) -> str:
    """As plain text."""
    lines = [("", "", "FROM", "TO", "SECONDS", ""), *cells(found)]
    table = (
        f"{role:10}{name:28}{begin:>7}{end:>8}{took:>9}  {who}".rstrip() for role, name, begin, end, took, who in lines
    )
    return "\n".join([headline(found), *table])


def as_numbers(found: Startup) -> dict[str, Any]:
    """For programs."""
    return {
        "attempt": found.attempt,
        "seconds": found.seconds,
        "phases": [
            {
                "role": row.role,
                "phase": row.name,
                "begin": row.begin,
                "end": row.end,
                "seconds": row.seconds,
                "who": row.who,
            }
            for row in found.rows
        ],
        "longest": f"{found.longest.name} of {found.longest.who}" if found.longest else "",
    }
