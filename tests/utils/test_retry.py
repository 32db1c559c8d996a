"""What is tried again, how often, and what is raised in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from hpcrl.utils.waiting import Deadline, Pauses, retry, retry_async

NOW = Pauses(0.0, 0.0)


def run_async(action: Callable[[], Any], *args: Any, **more: Any) -> Any:
    async def awaited() -> Any:
        return action()

    return asyncio.run(retry_async(awaited, *args, **more))


class Failing:
    """Fails `times` times with `error`, then answers."""

    def __init__(self, times: int, error: type[Exception] = OSError) -> None:
        self.left = times
        self.error = error
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise self.error(f"failure {self.calls}")
        return "answer"


BOTH = pytest.mark.parametrize("kind", [retry, run_async])


@BOTH
def test_what_may_pass_is_tried_until_it_works(kind: Callable[..., Any]) -> None:
    action = Failing(3)
    assert kind(action, OSError, Deadline(60.0), NOW) == "answer" and action.calls == 4


@BOTH
def test_what_may_not_pass_is_raised_at_once(kind: Callable[..., Any]) -> None:
    for passing in (OSError, lambda error: "2" in str(error)):
        action = Failing(3, ValueError)
        with pytest.raises(ValueError, match="failure 1"):
            kind(action, passing, Deadline(60.0), NOW)
        assert action.calls == 1


@BOTH
def test_the_last_failure_says_how_often_it_was_tried(kind: Callable[..., Any]) -> None:
    action = Failing(9)
    with pytest.raises(OSError, match="failure 4") as caught:
        kind(action, OSError, Deadline(60.0), NOW, attempts=4)
    assert caught.value.attempts == action.calls == 4  # type: ignore[attr-defined]


@BOTH
def test_nothing_is_tried_after_the_deadline(kind: Callable[..., Any]) -> None:
    action = Failing(10**6)
    deadline = Deadline(0.3)
    with pytest.raises(OSError, match="failure"):
        kind(action, OSError, deadline, Pauses(0.1, 0.1))
    assert 1 <= action.calls <= 3
    with pytest.raises(OSError, match="failure"):
        kind(action := Failing(10**6), OSError, Deadline(0.0), NOW)
    assert action.calls == 1


def test_a_failure_that_is_tried_again_is_told() -> None:
    told: list[str] = []
    retry(Failing(2), OSError, Deadline(60.0), NOW, failed=lambda error: told.append(str(error)))
    assert told == ["failure 1", "failure 2"]


def test_it_sleeps_between_two_attempts() -> None:
    began = time.monotonic()
    retry(Failing(2), OSError, Deadline(60.0), Pauses(0.05, 1.0))
    assert time.monotonic() - began >= 0.15


def test_pauses_grow_up_to_a_limit() -> None:
    assert list(islice(Pauses(1.0, 5.0), 4)) == [1.0, 2.0, 4.0, 5.0]
    assert [Pauses(0.2, 3.2, growth=4.0).after(n) for n in (1, 2, 3, 4)] == pytest.approx([0.2, 0.8, 3.2, 3.2])
    assert Pauses(1.0, 5.0, spread=0.5).after(1) == 1.5 and Pauses(1.0, 5.0).after(10**6) == 5.0


def test_a_copy_of_pauses_grows_as_long() -> None:
    copy = Pauses(1.0, 30.0).spread(0.5)
    assert list(islice(copy, 7)) == [1.5, 2.5, 4.5, 8.5, 16.5, 30.0, 30.0]


@BOTH
def test_nothing_is_tried_once_the_time_is_over(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep may be late: the failure before it is the last."""
    sleep = asyncio.sleep

    async def late(seconds: float) -> None:
        await sleep(seconds + 0.2)

    monkeypatch.setattr(asyncio, "sleep", late)
    monkeypatch.setattr(Deadline, "sleep", lambda self, seconds: time.sleep(seconds + 0.2))
    action = Failing(3)
    with pytest.raises(OSError, match="failure 1"):
        kind(action, OSError, Deadline(0.1), Pauses(0.01, 0.01))
    assert action.calls == 1
