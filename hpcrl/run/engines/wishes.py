"""What a user wishes of a running attempt's engines: marks in attempts/N, beside `stop` and `end`.

    remove-engine-I        engine I is to finish its requests and to end

Invariant: a mark is never taken back within its attempt, so that whoever looks late sees it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import RunDir

_REMOVE = re.compile(r"remove-engine-(\d+)")


def wish_removed(rundir: RunDir, index: int) -> None:
    """Say that engine `index` is to end.  HpcrlError if that cannot be written."""
    path = rundir.here / f"remove-engine-{index}"
    try:
        path.touch(mode=0o600)
    except OSError as error:
        raise HpcrlError(f"cannot write {path}: {error.strerror}") from error


def removed(signs: Iterable[str]) -> set[int]:
    """The engines that are to end, by the names in attempts/N (`RunDir.signs`)."""
    return {int(match[1]) for name in signs if (match := _REMOVE.fullmatch(name))}
