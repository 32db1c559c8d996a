"""The phases of a start: which there are, what took longest, and of which attempt they are."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.report.timeline.reading import Span, Track
from hpcrl.report.timeline.run_spending import Recorded
from hpcrl.report.timeline.spans import (
    BEGINS,
    ENGINES,
    IMPORT,
    LOAD,
    MAKE,
    PREPARE,
    READ,
    START,
    TRAIN,
    UPDATE,
    WAIT,
    Header,
)
from hpcrl.report.timeline.startup import as_numbers, headline, startup, text

T0 = 1_000_000_000  #: microseconds at which the launcher begins

Given = Sequence[tuple[str, float, float]]


def track(role: str, index: int, attempt: int | None, spans: Given, opened: float = 0.0) -> Track:
    """A process's; seconds since T0."""
    at = T0 + int(1e6 * opened)
    header = Header(role=role, index=index, host="n1", pid=1, opened=at)
    found = [Span(name, T0 + int(1e6 * begin), T0 + int(1e6 * end), {}) for name, begin, end in spans]
    return Track(header, attempt, found)


def recorded(*later: Track) -> Recorded:
    """A job that prepares for 2 s, and begins its first attempt at 2 s."""
    launcher = track("launcher", 0, None, [(PREPARE, 0, 2), (BEGINS, 2, 2), *((BEGINS, 50, 50) for _ in later[:1])])
    first = [
        track("engine", 0, 0, [(IMPORT, 3, 9), (LOAD, 9, 16), (START, 2.5, 17)], 2.6),
        track("engine", 1, 0, [(IMPORT, 3, 8), (LOAD, 8, 18), (START, 2.5, 19), (LOAD, 30, 45), (START, 29, 46)], 2.6),
        track("rollout", 0, 0, [(START, 2.5, 6), (MAKE, 20, 22), (MAKE, 24, 25)], 2.6),
        track(
            "trainer",
            0,
            0,
            [
                *((IMPORT, 4, 9), (READ, 9, 11), (ENGINES, 11, 19), (START, 4, 19), (UPDATE, 19, 20), (WAIT, 20, 22)),
                *((TRAIN, 22, 23), (UPDATE, 23, 24), (WAIT, 24, 25), (TRAIN, 25, 26)),
            ],
            4.5,
        ),
        track("trainer", 1, 0, [(IMPORT, 4, 9), (READ, 9, 13)], 4.5),
    ]
    return Recorded([launcher], {"": [*first, *later]})


def test_every_phase_has_a_row_of_its_slowest() -> None:
    """A phase lasts from the first process that begins it to the last that ends it, and names the one that took
    longest; what comes after the first trained step, such as the second start of an engine, is no part of the start."""
    found = startup(recorded())
    assert found is not None and (found.attempt, found.seconds) == (0, 23.0)
    rows = {(row.role, row.name): row for row in found.rows}
    load = rows["engine", LOAD]
    assert (load.begin, load.end, load.seconds, load.who) == (8, 18, 10, "engine-1")
    assert rows["trainer", READ][2:6] == (9, 13, 4, "trainer-1")
    assert rows["launcher", PREPARE][2:5] == (0, 2, 2)
    assert rows["trainer", "train the first step"][2:5] == (22, 23, 1)
    assert rows["rollout", "make the first rollout"].end == 22


def test_waiting_is_never_what_took_longest() -> None:
    """The trainer's wait for engines (8 s) and an engine's whole start (17 s) are longer than its import and less than
    what is named: loading, of the engine that loads longest."""
    found = startup(recorded())
    assert found is not None and found.longest is not None
    assert (found.longest.name, found.longest.who) == (LOAD, "engine-1")
    assert "23.0 s" in headline(found) and f"{LOAD} of engine-1, 10.0 s" in headline(found)
    lines = text(found).splitlines()
    assert len(lines) == 2 + len(found.rows) and max(map(len, lines)) < 120
    assert as_numbers(found)["longest"] == f"{LOAD} of engine-1"


def test_a_later_attempt_counts_from_its_own_begin() -> None:
    """The last attempt that trained is shown, from when it began and without what the job did before it."""
    again = track("trainer", 0, 1, [(IMPORT, 51, 53), (START, 51, 54), (TRAIN, 55, 56)], 52)
    found = startup(recorded(again))
    assert found is not None and (found.attempt, found.seconds) == (1, 6.0)
    assert (PREPARE not in {row.name for row in found.rows}) and "attempt 1" in headline(found)
    stuck = track("trainer", 0, 2, [(IMPORT, 51, 53)], 52)
    assert startup(recorded(again, stuck)) == found


def test_a_run_without_phases_still_has_its_start() -> None:
    """What an older hpcrl has recorded is shown, and a run that never trained has no start."""
    launcher = track("launcher", 0, None, [(BEGINS, 1, 1)])
    old = track("trainer", 0, 0, [(START, 2, 9), (TRAIN, 10, 11)], 3)
    found = startup(Recorded([launcher], {"": [old]}))
    assert found is not None and found.seconds == 11 and found.longest is not None
    assert startup(Recorded([launcher], {"": [track("trainer", 0, 0, [(START, 2, 9)], 3)]})) is None
    assert startup(Recorded([], {})) is None
