"""STAGE/passed-over.json: damaged checkpoints that a resume has passed over, for the launcher and `hpcrl status`.

Invariant: an entry stays, since the steps after the checkpoint that was taken instead were trained a second time; the
same event is there once, however often its attempt is started again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.run.rundir import RunDir, read_if_whole, write_atomic

PASSED_OVER = "passed-over.json"  #: its name in a stage's directory


class PassedOver(msgspec.Struct, frozen=True):
    """One resume that did not take the newest checkpoint.

    Attributes:
        attempt: that resumed.
        text: what was wrong, and what was taken.
    """

    attempt: int
    text: str


def read_passed_over(directory: Path) -> list[PassedOver]:
    """The entries of a stage, in order; none if there are none, or they cannot be read."""
    return read_if_whole(directory / PASSED_OVER, list[PassedOver]) or []


def tell_passed_over(rundir: RunDir, text: str) -> None:
    """Say it in this process's log, and add an entry, unless it is the last one already.

    Raises:
        HpcrlError: if it cannot be written.
    """
    from hpcrl.run.role import say  # it takes pydantic, which `hpcrl status` does without

    say(f"warning: {text}")
    entries = read_passed_over(rundir.root)
    if not entries or entries[-1].text != text:
        data = msgspec.json.encode([*entries, PassedOver(rundir.attempt, text)])
        write_atomic(rundir.root / PASSED_OVER, data)
