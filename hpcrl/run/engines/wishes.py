"""What a user wishes of a running attempt's engines: marks in attempts/N, beside `stop` and `end`.

    remove-engine-I        engine I is to finish its requests and to end
    hand-back-engine-I     it has no time for that: what there is of its responses goes on elsewhere

Invariant: a mark is never taken back within its attempt, so that whoever looks late sees it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import RunDir

_REMOVE = re.compile(r"remove-engine-(\d+)")
_HAND_BACK = re.compile(r"hand-back-engine-(\d+)")


def wish_removed(rundir: RunDir, index: int) -> None:
    """Say that engine `index` is to end.  HpcrlError if that cannot be written."""
    _mark(rundir, f"remove-engine-{index}")


def wish_handed_back(rundir: RunDir, index: int) -> None:
    """Say that engine `index` is to hand its unfinished responses back.  HpcrlError if that cannot be written."""
    _mark(rundir, f"hand-back-engine-{index}")


def _mark(rundir: RunDir, name: str) -> None:
    path = rundir.here / name
    try:
        path.touch(mode=0o600)
    except OSError as error:
        raise HpcrlError(f"cannot write {path}: {error.strerror}") from error


def removed(signs: Iterable[str]) -> set[int]:
    """The engines that are to end, by the names in attempts/N (`RunDir.signs`)."""
    return {int(match[1]) for name in signs if (match := _REMOVE.fullmatch(name))}


def handed_back(signs: Iterable[str]) -> set[int]:
    """The engines whose responses are to go on elsewhere, by the same names."""
    return {int(match[1]) for name in signs if (match := _HAND_BACK.fullmatch(name))}
