"""What a run's node-hours went into: it adds up, whatever was killed, shared or unknown."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.plan import Host, Location, Plan
from hpcrl.report.run_files import Run
from hpcrl.report.timeline.node_hours import HOUR, Attempt, NodeHours, Owner, divide, lost_from, node_hours
from hpcrl.report.timeline.reading import Span, Track, read_run
from hpcrl.report.timeline.spans import (
    ATTEMPT,
    BEGINS,
    COSTS,
    GENERATE,
    MAKE,
    PAUSED,
    READY,
    SAVE,
    SAVED,
    STEP,
    TRAIN,
    UPDATE,
    WAIT,
    Header,
)
from tests.support.rundirs import make

H = HOUR


def hours(begin: int, end: int, nodes: dict[str, int], attempts: list[Attempt]) -> dict[str, float]:
    found = NodeHours()
    found.add(begin, end, nodes, attempts)
    assert found.total == pytest.approx((end - begin) * len(nodes) / HOUR)
    return {phase: value for phase, value in found.phases.items() if value}


moments = st.integers(0, 1000)
work = st.lists(
    st.tuples(
        moments, moments, st.sampled_from(["training", "generating", "updating", "saving", "starting", "waiting"])
    )
)


@given(work, moments, st.integers(0, 1000))
def test_a_division_adds_up(pieces: list, begin: int, length: int) -> None:
    found = divide(pieces, begin, begin + length)
    assert sum(found.values()) == length and all(value > 0 for value in found.values())
    for at in range(begin, begin + length, 37):  # against the definition, moment by moment
        here = {cost for start, end, cost in pieces if start <= at < end}
        first = next((c for c in ("training", "updating", "saving", "generating", "starting") if c in here), "waiting")
        assert first in found


owners = st.builds(Owner, st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple), work)
attempts = st.builds(Attempt, moments, moments, st.none() | moments, st.none() | moments, st.lists(owners, max_size=4))


@given(
    moments,
    moments,
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4), min_size=1),
    st.lists(attempts, max_size=3),
)
def test_an_allocation_adds_up_whatever_it_did(begin: int, length: int, nodes: dict, done: list) -> None:
    found = hours(begin, begin + length, nodes, done)
    assert set(found) <= set(COSTS) and min(found.values(), default=0.0) >= 0


def test_the_busiest_owner_of_a_slot_counts() -> None:
    """Two slots that trainer and engine share; a third is idle."""
    owners = [Owner("n", (0, 1), [(0, 4 * H, "training")]), Owner("n", (0, 1), [(0, 6 * H, "generating")])]
    found = hours(0, 10 * H, {"n": 3}, [Attempt(0, 10 * H, 0, None, owners)])
    assert found == pytest.approx({"training": 8 / 3, "generating": 4 / 3, "waiting": 6})


def test_a_heterogeneous_job() -> None:
    """Trainers on one node, an engine over two, the rollout process on one without GPUs."""
    owners = [
        Owner("t", (0, 1), [(2 * H, 5 * H, "training")]),
        Owner("e1", (0,), [(H, 2 * H, "generating")]),
        Owner("e2", (0,), [(H, 2 * H, "generating")]),
        Owner("cpu", (), [(H, 3 * H, "generating")]),
    ]
    found = hours(0, 6 * H, {"t": 2, "e1": 1, "e2": 1, "cpu": 0}, [Attempt(0, 6 * H, H, None, owners)])
    assert found == {"starting": 4, "training": 3, "generating": 4, "waiting": 2 + 4 + 4 + 3}


def test_what_a_later_attempt_repeats_is_lost() -> None:
    owner = [Owner("n", (0,), [(2 * H, 5 * H, "training")])]
    done = [Attempt(H, 5 * H, 2 * H, 4 * H, owner), Attempt(6 * H, 7 * H, None, 6 * H)]
    assert hours(0, 8 * H, {"n": 1}, done) == {"starting": 1 + 1 + 1 + 1, "training": 2, "lost": 1 + 1}


# ---- what was lost


def driver(*spans: Span) -> Track:
    return Track(Header(role="trainer", index=0, host="n1", pid=1, opened=0), 0, list(spans))


def span(name: str, begin: float, end: float | None = None, **more: object) -> Span:
    return Span(name, int(begin * H), int((begin if end is None else end) * H), more)


STEPS = [span(STEP, number + 1, number + 2, rollout_id=number + 4) for number in range(4)]  # 4 to 7


@pytest.mark.parametrize(
    ("saved", "next_start", "expected"),
    [
        ([], None, None),  # nothing is kept
        ([6], None, 3),  # 4 and 5 are
        ([6], 6, 3),
        ([6], 4, None),  # the checkpoint turned out to be of no use
        ([8], 8, 5),  # what came after the last step was not finished
    ],
)
def test_lost_is_what_comes_after_the_last_checkpoint(
    saved: list[int], next_start: int | None, expected: float | None
) -> None:
    track = driver(span(READY, 1, rollout_id=4), *STEPS, *(span(SAVED, 4.5, rollout_id=number) for number in saved))
    assert lost_from(track, next_start) == (None if expected is None else expected * H)


def test_an_attempt_that_never_trained_is_lost() -> None:
    assert lost_from(None, 4) is None and lost_from(driver(span(TRAIN, 1, 2)), 4) is None


# ---- from a run directory

PLAN = Plan("id", 0, (Location("n1", (0,)), Location("n1", (1,))), (Location("n2", (0, 1)),), Location("n3", ()))


def lines(path: Path, header: Header, *spans: Span) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [msgspec.json.encode(header), *(msgspec.json.encode(list(row)) for row in spans)]
    path.write_bytes(b"\n".join(rows) + b"\n")


def head(role: str, index: int = 0, host: str = "n1", opened: float = 0) -> Header:
    return Header(role=role, index=index, host=host, pid=1, opened=int(opened * H))


def test_a_killed_run_and_its_continuation(tmp_path: Path) -> None:
    """Two jobs: the first is killed in its third step, saved after its first; the second finishes."""
    root = make(tmp_path / "run")
    for number in (0, 1):
        here = root / "attempts" / str(number)
        here.mkdir(parents=True)
        (here / "plan.json").write_bytes(msgspec.json.encode(PLAN))
        (here / "hosts.json").write_bytes(msgspec.json.encode([Host("n1", 2), Host("n2", 4), Host("n3", 0)]))
    first = root / "timeline" / "attempt-0"
    second = root / "timeline" / "attempt-1"
    lines(
        root / "timeline" / "launcher-0.jsonl", head("launcher"), span(BEGINS, 1, stage="", attempt=0), span("alive", 8)
    )
    lines(
        first / "trainer-0.jsonl", head("trainer", opened=1.5), span(READY, 2, rollout_id=0),
        span(WAIT, 2, 3), span(TRAIN, 3, 4), span(STEP, 2, 4, rollout_id=0), span(SAVE, 4, 4.5), span(SAVED, 4.5, rollout_id=1),
        span(STEP, 4.5, 7, rollout_id=1),
    )  # fmt: skip
    lines(
        first / "rollout-0.jsonl",
        head("rollout", host="n3"),
        span(GENERATE, 2, 3, engine=0),
        span(MAKE, 2, 3, rollout_id=0),
    )
    lines(
        root / "timeline" / "launcher-1.jsonl", head("launcher", 1, opened=100),
        span(BEGINS, 100, stage="", attempt=1), span(ATTEMPT, 100, 104, stage="", attempt=1, status="finished"),
    )  # fmt: skip
    lines(
        second / "trainer-0.jsonl", head("trainer", opened=100), span(READY, 101, rollout_id=1), span(STEP, 101, 103, rollout_id=1),
        span(TRAIN, 101, 102), span(PAUSED, 102.5, 103), span(UPDATE, 102, 103),
    )  # fmt: skip
    run = Run(root)
    found = node_hours(run, read_run(run))
    assert (found.seconds, found.starts, found.attempts, found.lost) == (12 * 3600, 2, 2, 1)
    assert found.total == pytest.approx(12 * 3)
    first = {
        "starting": 3 * 2, "training": 1, "saving": 0.5, "generating": 0.5 + 1, "lost": 3 * 3.5,
        "waiting": (2.5 - 1.5) + (2.5 - 0.5) + (2.5 - 1),
    }  # fmt: skip
    second = {"starting": 3, "training": 1, "updating": 1 + 0.25, "waiting": 1 + 2.75 + 3}
    assert found.phases == pytest.approx({phase: first.get(phase, 0) + second.get(phase, 0) for phase in COSTS})
    assert found.rows()[-2:] == [("lost", "10.5", "29.2 %"), ("total", "36", "100.0 %")]
    assert not run.notes


def test_run_without_timelines(tmp_path: Path) -> None:
    """A run without timelines has no known costs."""
    root = make(tmp_path / "run")
    (root / "timeline").mkdir()
    (root / "timeline" / "launcher-0.jsonl").write_text(json.dumps({"role": "launcher"}) + "\n")
    assert node_hours(Run(root), read_run(Run(root))).rows() == []
