"""The ledger: where every group is that was ever issued, and what a run writes down of it.  `Ledger` is pure: numbers
in, numbers out; no clock, no disk, no sample.

The law.  The source numbers groups from 0 in the order in which it hands them out.  At any moment every number below
`following` is in exactly one place, and every other is in the source:

    in flight   engines work on it
    buffer      it is not finished, and it is not worked on
    bank        it is finished and not trained; `claimed` says which rollout it was handed over with, if with any
    trained
    dropped     for a named reason

A group goes from place to place by the steps below alone, and leaves the last two never.  Hence, always,

    following = in flight + buffer + bank + trained + dropped

What is trained or dropped is only counted, so a ledger is as large as what is alive, however long the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hpcrl.errors import DataError
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.utils.untrusted_files import open_append

REASONS = 100  #: kinds of reasons that are counted one by one; a filter that invents more has the rest counted as OTHER
OTHER = "other"


@dataclass
class Ledger:
    """The places.

    Attributes:
        claimed: groups of the bank -> the rollout that they went with.

    Raises:
        ValueError: for an invalid step.
    """

    following: int = 0
    in_flight: set[int] = field(default_factory=set)
    buffer: set[int] = field(default_factory=set)
    bank: set[int] = field(default_factory=set)
    claimed: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    # ---- the steps

    def issue(self, number: int) -> None:
        """The source has handed out `number`, the next: source -> in flight."""
        if number != self.following:
            raise ValueError(f"group {number} was issued, {self.following} is next")
        self.following += 1
        self.in_flight.add(number)

    def resume(self, number: int) -> None:
        """buffer -> in flight."""
        self._move(number, self.buffer, self.in_flight)

    def put_back(self, number: int) -> None:
        """in flight -> buffer."""
        self._move(number, self.in_flight, self.buffer)

    def finish(self, number: int) -> None:
        """in flight -> bank."""
        self._move(number, self.in_flight, self.bank)

    def claim(self, number: int, rollout_id: int) -> None:
        """A group of the bank that no rollout has is handed over with this one."""
        self._free(number)
        self._in(number, self.bank)
        self.claimed[number] = rollout_id

    def reopen(self, number: int) -> None:
        """bank -> buffer, of what no rollout has: a response of it has to be made again."""
        self._free(number)
        self._move(number, self.bank, self.buffer)

    def train(self, rollout_id: int) -> list[int]:
        """bank -> trained, of all that was for rollouts up to `rollout_id`; those groups."""
        done = [number for number, rollout in self.claimed.items() if rollout <= rollout_id]
        for number in done:
            del self.claimed[number]
            self.bank.remove(number)
        self.trained += len(done)
        return done

    def drop(self, number: int, reason: str) -> None:
        """in flight, buffer, or bank without a rollout -> dropped."""
        self._free(number)
        for place in (self.in_flight, self.buffer, self.bank):
            if number in place:
                place.remove(number)
                break
        else:
            raise ValueError(f"group {number} cannot be dropped for {reason}: it is nowhere")
        if reason not in self.dropped and len(self.dropped) >= REASONS:
            reason = OTHER
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _move(self, number: int, here: set[int], there: set[int]) -> None:
        self._in(number, here)
        here.remove(number)
        there.add(number)

    def _in(self, number: int, place: set[int]) -> None:
        if number not in place:
            raise ValueError(f"group {number} is not where it is taken from")

    def _free(self, number: int) -> None:
        if number in self.claimed:
            raise ValueError(f"group {number} is for rollout {self.claimed[number]}")

    # ---- looking

    @property
    def waiting(self) -> list[int]:
        """What can be taken before the source: in the bank without a rollout, or in the buffer; in order."""
        return sorted((self.bank - self.claimed.keys()) | self.buffer)

    def holds(self) -> bool:
        """Whether the law holds."""
        alive = len(self.in_flight) + len(self.buffer) + len(self.bank)
        apart = len(self.in_flight | self.buffer | self.bank) == alive and self.claimed.keys() <= self.bank
        return apart and self.following == alive + self.trained + sum(self.dropped.values())

    # ---- across a restart

    def state(self, rollout_id: int) -> dict[str, Any]:
        """As plain JSON, how it stands once `rollout_id` is trained; what is in flight is then in the buffer."""
        done = {number for number, rollout in self.claimed.items() if rollout <= rollout_id}
        return {
            "following": self.following,
            "buffer": sorted(self.buffer | self.in_flight),
            "bank": sorted(self.bank - done),
            "trained": self.trained + len(done),
            "dropped": dict(self.dropped),
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Ledger:
        """A ledger as `state` has it.

        Raises:
            DataError: if it breaks the law.
        """
        try:
            buffer, bank = (set(map(int, state[name])) for name in ("buffer", "bank"))
            dropped = {str(reason): int(count) for reason, count in state["dropped"].items()}
            found = cls(int(state["following"]), set(), buffer, bank, {}, int(state["trained"]), dropped)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the checkpoint's ledger is damaged: {error!r}", "resume from another checkpoint"
            ) from error
        if not found.holds() or any(not 0 <= number < found.following for number in buffer | bank):
            raise DataError(
                "the checkpoint's ledger does not account for every group", "resume from another checkpoint"
            )
        return found

    @classmethod
    def after(cls, trained: int) -> Ledger:
        """A ledger of a run whose first `trained` groups were trained, and no others issued."""
        return cls(following=trained, trained=trained)


def numbers_in(ranges: Iterable[Iterable[int]]) -> list[int]:
    """[[first, last], ...] -> every number in them."""
    return [number for first, last in ranges for number in range(first, last + 1)]


def ranges_of(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as [[first, last], ...], in order."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


# ---- what is written down
# Each attempt writes a line to RUN/ledger/attempt-N.jsonl when it begins, one for every rollout that it hands over, and
# one when that rollout is trained, each before what it tells of can be seen outside; the state goes to RUN/ledger.json.
# An attempt that begins at rollout r makes again what earlier ones did from r on.

Ranges = list[list[int]]


class AttemptBegun(msgspec.Struct, tag="begun", tag_field="event"):
    """An attempt begins at `rollout`. Of the groups, as [first, last] of numbers: buffer, bank.

    Attributes:
        kept: groups after the checkpoint with something on disk that could still be used.
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
