"""Deadlines by a clock that the test turns."""

from __future__ import annotations

import math

import pytest

from hpcrl.utils import waiting
from hpcrl.utils.waiting import Deadline, poll


class TimeLimitWatcher:
    """In place of the module `time`: sleeping turns it."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TimeLimitWatcher:
    made = TimeLimitWatcher()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_what_is_left(clock: TimeLimitWatcher) -> None:
    end = Deadline(5)
    assert end.left == 5 and not end.over and end.seconds == 5
    clock.now += 4
    assert end.left == 1 and not end.over
    clock.now += 4
    assert end.left == 0 and end.over
    assert Deadline(math.inf).left == math.inf


def test_a_sleep_does_not_go_beyond(clock: TimeLimitWatcher) -> None:
    end = Deadline(5)
    end.sleep(3)
    end.sleep(3)
    assert clock.now == 105 and end.over


def test_poll_takes_the_first_answer(clock: TimeLimitWatcher) -> None:
    assert poll(lambda: clock.now if clock.now >= 102 else None, Deadline(5), every=0.5) == 102


def test_poll_looks_a_last_time_in_the_end(clock: TimeLimitWatcher) -> None:
    looked: list[float] = []
    assert poll(lambda: looked.append(clock.now), Deadline(1), every=0.75) is None
    assert looked == [100, 100.75, 101]


def test_poll_looks_once_without_time(clock: TimeLimitWatcher) -> None:
    assert poll(lambda: "there", Deadline(0), every=1) == "there"
    assert clock.now == 100
