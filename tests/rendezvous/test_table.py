"""What a store answers, and when."""

from __future__ import annotations

import pytest

from hpcrl.rendezvous.table import StoreReply, StoreRequest, Table


def test_waiting_for_several_keys() -> None:
    """A request for keys waits for all of them and is answered once."""
    table = Table()
    assert table.take(b"a", StoreRequest(1, "get", ["x", "y"])) == []
    assert table.take(b"b", StoreRequest(7, "wait", ["y"])) == []
    assert table.take(b"c", StoreRequest(1, "set", ["y"], [b"2"])) == [(b"c", StoreReply(1)), (b"b", StoreReply(7))]
    assert table.take(b"c", StoreRequest(2, "set", ["x"], [b"1"])) == [
        (b"c", StoreReply(2)),
        (b"a", StoreReply(1, [b"1", b"2"])),
    ]
    assert table.take(b"c", StoreRequest(3, "set", ["x"], [b"0"])) == [(b"c", StoreReply(3))]


def test_counting_and_comparing_are_torchs() -> None:
    table = Table()
    sums = [table.take(b"a", StoreRequest(i, "add", ["n"], [], by))[0][1].amount for i, by in enumerate([2, 0, -3])]
    assert sums == [2, 2, -1]

    def swap(expected: bytes, desired: bytes) -> bytes:
        request = StoreRequest(0, "swap", ["k"], [expected, desired])
        return table.take(b"a", request)[0][1].values[0]

    assert swap(b"old", b"new") == b"old", "a key that is not there, and was expected to be, stays away"
    assert swap(b"", b"one") == b"one"
    assert swap(b"two", b"three") == b"one"
    assert swap(b"one", b"two") == b"two"
    table.take(b"a", StoreRequest(0, "append", ["k"], [b"!"]))
    assert table.take(b"a", StoreRequest(0, "get", ["k"]))[0][1].values == [b"two!"]
    assert table.take(b"a", StoreRequest(0, "check", ["k", "n"]))[0][1].amount == 1
    assert [table.take(b"a", StoreRequest(0, "delete", ["k"]))[0][1].amount for _ in range(2)] == [1, 0]
    assert table.take(b"a", StoreRequest(0, "check", ["k", "n"]))[0][1].amount == 0
    assert table.take(b"a", StoreRequest(0, "count"))[0][1].amount == 1


@pytest.mark.parametrize(
    "ask",
    [
        StoreRequest(0, "set", ["a"], []),
        StoreRequest(0, "add", []),
        StoreRequest(0, "append", ["a"]),
        StoreRequest(0, "swap", ["a"], [b""]),
    ],
)
def test_what_makes_no_sense_is_a_value_error(ask: StoreRequest) -> None:
    table = Table()
    with pytest.raises(ValueError, match="."):
        table.take(b"a", ask)
    assert not table.values
