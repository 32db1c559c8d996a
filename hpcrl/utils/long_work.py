"""Work that may take long, while something else is to be done a few times a second.

    found = work_in_turns(lambda: look_through(root), turn)

Invariants: `turn` is called in the caller's thread alone; the result, or the error, is that of the work; there is no
return before the work has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
EVERY = 0.2  #: seconds between two turns


def work_in_turns(work: Callable[[], T], turn: Callable[[], object]) -> T:
    """The result of `work`, which another thread does; meanwhile `turn` is called."""
    with ThreadPoolExecutor(1, "work in turns") as pool:
        future = pool.submit(work)
        while not wait([future], EVERY).done:
            turn()
        return future.result(0)
