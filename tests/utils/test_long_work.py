"""Long work leaves time for others."""

from __future__ import annotations

import threading

import pytest

from hpcrl.utils.long_work import work_in_turns


def test_turns_are_taken_while_work_is_done() -> None:
    """In the caller's thread, as long as the work takes; its result and its error are the caller's."""
    turns: list[int] = []
    enough = threading.Event()

    def turn() -> None:
        turns.append(threading.get_ident())
        if len(turns) == 3:
            enough.set()

    def work() -> str:
        assert threading.get_ident() != threading.main_thread().ident
        return "found" if enough.wait(60) else "no turn was taken"

    assert work_in_turns(work, turn) == "found"
    assert set(turns) == {threading.get_ident()} and len(turns) >= 3

    def fails() -> None:
        raise TimeoutError("the file system")

    with pytest.raises(TimeoutError, match="the file system"):
        work_in_turns(fails, turn)
