"""What a run writes down of its groups: RUN/ledger/attempt-N.jsonl, a line for each event, and RUN/ledger.json, how it
stands.

Invariant: a line is written before what it tells of can be seen outside; `account` reads all attempts and says whether
they add up.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.careful_files import SAMPLES, read_regular
from hpcrl.rollout.ledger.account import Account, Line, account_of, read_lines
from hpcrl.rollout.ledger.ledger import Ledger
from hpcrl.run.rundir import RunDir, write_atomic

FOLDER, SUMMARY = "ledger", "ledger.json"


class Journal:
    """The lines of one attempt."""

    def __init__(self, rundir: RunDir) -> None:
        folder = rundir.root / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._file = (folder / f"attempt-{rundir.attempt}.jsonl").open("ab")
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


def account(root: str | Path) -> Account:
    """The account of the run in a directory."""
    paths = sorted((Path(root) / FOLDER).glob("attempt-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return account_of(read_lines(read_regular(path, SAMPLES)) for path in paths)
