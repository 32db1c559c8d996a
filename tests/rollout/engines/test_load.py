"""How busy engines are: shares of time, and when each of them had requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.engines.load import SAME, Loads

S = 1_000_000


class Bench:
    """The engines' loads, with a clock that is set by hand."""

    def __init__(self, limit: int = 10) -> None:
        self.at = 0
        self.told = list[tuple[int, float, float]]()
        self.of = Loads(
            limit, lambda: self.at, lambda engine, begin, end: self.told.append((engine, begin / S, end / S))
        )

    def set(self, seconds: float, engine: int, load: int) -> None:
        self.at = int(seconds * S)
        self.of.move(engine, load - self.of[engine])


def test_shares_of_time() -> None:
    bench = Bench()
    bench.of.add(0)
    bench.of.add(1)
    bench.set(1, 0, 4)
    bench.set(2, 1, 2)
    bench.set(3, 0, 0)
    bench.at = 4 * S
    assert bench.of.measures() == pytest.approx(
        {
            "perf/engine_idle_ratio": (1 + 2 + 1) / 8,  # engine 1 for two seconds; engine 0 for one, and one
            "perf/engine_occupancy": (4 * 2 + 2 * 2) / (8 * 10),
            "perf/requests_in_flight": 3,
            "perf/requests_in_flight_max": 6,
        }
    )
    bench.at = 5 * S
    assert bench.of.measures()["perf/requests_in_flight"] == 2  # a new window, in which what is in flight goes on
    assert bench.told == [(0, 1, 3), (1, 2, 4), (1, 4, 5)]


def test_without_engines_there_is_nothing_to_say() -> None:
    bench = Bench()
    bench.set(1, 0, 4)
    assert bench.of.measures() == {} and bench.of.total == 0


def test_short_gaps_are_no_idle_time_of_the_timeline() -> None:
    bench = Bench()
    bench.of.add(0)
    gap = SAME / S
    for at, load in ((1, 1), (2, 0), (2 + gap / 2, 3), (3, 0), (3 + 2 * gap, 1), (4, 0)):
        bench.set(at, 0, load)
    bench.of.close()
    assert bench.told == [(0, 1, 3), (0, 3 + 2 * gap, 4)]


def test_an_engine_that_is_gone_is_not_idle() -> None:
    bench = Bench()
    loads = bench.of
    loads.add(0)
    loads.add(1)
    loads.move(0, 5)
    bench.at = S
    loads.drop(0)
    loads.drop(0)
    assert (loads.total, 0 in loads) == (0, False)
    loads.move(0, -5)
    assert loads.total == 0
    bench.at = 3 * S
    found = bench.of.measures()
    assert (found["perf/engine_idle_ratio"], found["perf/requests_in_flight_max"]) == (
        3 / 4,
        5,
    ) and loads.total == 0
    assert bench.told == [(0, 0, 1)]


@given(st.lists(st.tuples(st.integers(0, 3 * SAME), st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_what_is_told_covers_what_was_busy(changes: list) -> None:
    bench = Bench()
    for engine in range(3):
        bench.of.add(engine)
    busy = [0, 0, 0]
    at = 0
    loads = [0, 0, 0]
    for passed, engine, load in changes:
        busy = [time + passed * (now > 0) for time, now in zip(busy, loads, strict=True)]
        at += passed
        loads[engine] = load
        bench.at = at
        bench.of.move(engine, load - bench.of[engine])
    bench.at = at
    found = bench.of.measures()
    if at:
        assert found["perf/engine_idle_ratio"] == pytest.approx(1 - sum(busy) / (3 * at))
    bench.of.close()
    for engine in range(3):
        told = sum(end - begin for who, begin, end in bench.told if who == engine)
        assert busy[engine] / S - 1e-6 <= told <= busy[engine] / S + len(changes) * SAME / S
