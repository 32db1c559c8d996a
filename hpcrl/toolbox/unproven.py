"""The connections of an HTTP server over which no key has come yet: which of them are closed when there are many.

    unproven = UnprovenConnections(close)
    unproven.made(one)                # as soon as it is there
    unproven.heard(one, sent)         # with all bytes that it has sent so far
    unproven.gone(one)                # it has brought a key, or has ended

asyncio accepts hundreds of connections, and calls connection_made for all of them, before it reads a byte of the first:
so many that have sent nothing are no sign of an attack.

Invariants: a connection that has sent LITTLE at most is not closed in its first YOUNG seconds, unless there are more
than a crowd; of more than MOST those are closed first that have sent more than LITTLE, then older ones that have sent
nothing, then other older ones, the oldest of each first; of more than LOUD that have sent much the oldest are closed.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Generic, TypeVar

from hpcrl.toolbox.signs import LastSign

#: connections without a key that stay open; those of the last YOUNG seconds may be up to CROWD, but a quarter of the
#: files that the process may have open
MOST, CROWD, YOUNG = 512, 4_096, 2.0
#: bytes within which an honest request has brought its key; connections that may have sent more without one
LITTLE, LOUD = 2**11, 128

T = TypeVar("T")


def crowd(most: int) -> int:
    """How many connections without a key there may be at all: `most`, or a quarter of the files that this process may
    have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(16, min(most, files // 4))


class UnprovenConnections(Generic[T]):
    """Those of one server, in its event loop."""

    def __init__(self, close: Callable[[T], None], most: int = MOST) -> None:
        """Create one.

        Args:
            close: ends a connection; it counts as gone already.
            most: that stay open when they are older than YOUNG seconds.
        """
        self._crowd = crowd(CROWD)
        self._most = min(most, self._crowd)
        self._close = close
        self._later: asyncio.TimerHandle | None = None
        # with the moment at which each was made, oldest first
        self._silent: dict[T, LastSign] = {}
        self._little: dict[T, LastSign] = {}
        self._much: dict[T, LastSign] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._silent or one in self._little or one in self._much

    def __len__(self) -> int:
        return len(self._silent) + len(self._little) + len(self._much)

    def made(self, one: T) -> None:
        """It was made just now."""
        self._silent[one] = LastSign()
        self._close_some()

    def heard(self, one: T, sent: int) -> None:
        """It has sent so many bytes in all, and no key yet."""
        stage = self._little if sent <= LITTLE else self._much
        if one in self and one not in stage:
            stage[one] = self._take(one) or LastSign()
            self._close_some()

    def gone(self, one: T) -> None:
        """It is not one of these any more."""
        self._take(one)

    def _take(self, one: T) -> LastSign | None:
        return self._silent.pop(one, None) or self._little.pop(one, None) or self._much.pop(one, None)

    def _close_some(self) -> None:
        while (one := self._next()) is not None:
            self._take(one)
            self._close(one)
        if len(self) > self._most and self._later is None:  # they may be older when the next one is made
            self._later = asyncio.get_running_loop().call_later(YOUNG / 4, self._look)

    def _look(self) -> None:
        self._later = None
        self._close_some()

    def _next(self) -> T | None:
        """The one that is closed next."""
        few = len(self) <= self._most
        if self._much and not (few and len(self._much) <= LOUD):
            return next(iter(self._much))
        if few:
            return None
        oldest = [next(iter(stage.items())) for stage in (self._silent, self._little) if stage]
        for one, made in oldest:
            if made.silence >= YOUNG:
                return one
        return max(oldest, key=lambda found: found[1].silence)[0] if len(self) > self._crowd else None
