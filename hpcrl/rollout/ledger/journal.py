"""What a run writes down of its groups: RUN/ledger/attempt-N.jsonl, a line for each event, and RUN/ledger.json, the
state.

Each attempt writes a line when it begins, one for every rollout that it hands over, and one when that rollout is
trained.  An attempt that begins at rollout r makes again what earlier ones did from r on.

Invariant: a line is written before what it tells of can be seen outside.
"""

from __future__ import annotations

import msgspec

from hpcrl.rollout.ledger.ledger import Ledger
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.utils.untrusted_files import open_append

Ranges = list[list[int]]


class AttemptBegun(msgspec.Struct, tag="begun", tag_field="event"):
    """An attempt begins at `rollout`. Of the groups, as [first, last] of numbers: buffer, bank.

    Attributes:
        kept: groups after the checkpoint of which there was something on disk that could still be used.
        again: of how many groups it could not.
    """

    attempt: int
    rollout: int
    following: int
    trained: int
    dropped: dict[str, int]
    buffer: Ranges
    bank: Ranges
    kept: Ranges = []
    again: int = 0


class HandedOver(msgspec.Struct, tag="rollout", tag_field="event"):
    """`batch` was given to the trainer as `rollout`; the rest as it stood then: what is in flight as buffer, bank
    without the batches of earlier rollouts."""

    rollout: int
    following: int
    batch: Ranges
    dropped: dict[str, Ranges]
    buffer: Ranges
    bank: Ranges


class RolloutTrained(msgspec.Struct, tag="trained", tag_field="event"):
    """The trainer has learned from `rollout`."""

    rollout: int


Line = AttemptBegun | HandedOver | RolloutTrained


FOLDER, SUMMARY = "ledger", "ledger.json"


class Journal:
    """The lines of one attempt."""

    def __init__(self, rundir: RunDir) -> None:
        folder = rundir.root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._file = open_append(folder / f"attempt-{rundir.attempt}.jsonl")
        self._summary = rundir.root / SUMMARY

    def write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def summarize(self, ledger: Ledger) -> None:
        """RUN/ledger.json: how many groups are where; claimed: of those in the bank, how many are for a rollout."""
        row = {
            "issued": ledger.following,
            "in_flight": len(ledger.in_flight),
            "buffer": len(ledger.buffer),
            "bank": len(ledger.bank),
            "claimed": len(ledger.claimed),
            "trained": ledger.trained,
            "dropped": dict(sorted(ledger.dropped.items())),
        }
        write_atomic(self._summary, msgspec.json.format(msgspec.json.encode(row)) + b"\n")

    def close(self) -> None:
        self._file.close()
