"""Signs of life by a clock that the test turns."""

from __future__ import annotations

import math

from hpcrl.utils.waiting import LastSign


class TimeLimitWatcher:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_counts_from_the_last_sign() -> None:
    clock = TimeLimitWatcher()
    sign = LastSign(clock=clock)
    assert sign.silence == 0
    clock.now += 7
    assert sign.silence == 7
    sign.heard()
    clock.now += 2
    assert sign.silence == 2
    assert LastSign(ago=3.0, clock=clock).silence == 3


def test_a_sign_of_our_own_is_due_once_an_interval() -> None:
    clock = TimeLimitWatcher()
    sign = LastSign(ago=math.inf, clock=clock)
    assert sign.due(2.0) and not sign.due(2.0), "who has never given one gives one at once"
    clock.now += 1.9
    assert not sign.due(2.0)
    clock.now += 0.1
    assert sign.due(2.0) and sign.silence == 0
