"""What a store answers, and when."""

from __future__ import annotations

import pytest

from hpcrl.rendezvous.frames import Answer, Ask
from hpcrl.rendezvous.table import Table


def test_a_wish_for_keys_waits_for_all_of_them_and_is_answered_once() -> None:
    table = Table()
    assert table.take(b"a", Ask(1, "get", ["x", "y"])) == []
    assert table.take(b"b", Ask(7, "wait", ["y"])) == []
    assert table.take(b"c", Ask(1, "set", ["y"], [b"2"])) == [(b"c", Answer(1)), (b"b", Answer(7))]
    assert table.take(b"c", Ask(2, "set", ["x"], [b"1"])) == [(b"c", Answer(2)), (b"a", Answer(1, [b"1", b"2"]))]
    assert table.take(b"c", Ask(3, "set", ["x"], [b"0"])) == [(b"c", Answer(3))]


def test_counting_and_comparing_are_torchs() -> None:
    table = Table()
    assert [table.take(b"a", Ask(i, "add", ["n"], [], by))[0][1].amount for i, by in enumerate([2, 0, -3])] == [
        2,
        2,
        -1,
    ]
    swap = lambda expected, desired: table.take(b"a", Ask(0, "swap", ["k"], [expected, desired]))[0][1].values[0]  # noqa: E731
    assert swap(b"old", b"new") == b"old", "a key that is not there, and was expected to be, stays away"
    assert swap(b"", b"one") == b"one"
    assert swap(b"two", b"three") == b"one"
    assert swap(b"one", b"two") == b"two"
    table.take(b"a", Ask(0, "append", ["k"], [b"!"]))
    assert table.take(b"a", Ask(0, "get", ["k"]))[0][1].values == [b"two!"]
    assert table.take(b"a", Ask(0, "check", ["k", "n"]))[0][1].amount == 1
    assert [table.take(b"a", Ask(0, "delete", ["k"]))[0][1].amount for _ in range(2)] == [1, 0]
    assert table.take(b"a", Ask(0, "check", ["k", "n"]))[0][1].amount == 0
    assert table.take(b"a", Ask(0, "count"))[0][1].amount == 1


@pytest.mark.parametrize(
    "ask", [Ask(0, "set", ["a"], []), Ask(0, "add", []), Ask(0, "append", ["a"]), Ask(0, "swap", ["a"], [b""])]
)
def test_what_makes_no_sense_is_a_value_error(ask: Ask) -> None:
    table = Table()
    with pytest.raises(ValueError, match="."):
        table.take(b"a", ask)
    assert not table.values
