"""The account of a run: from what its attempts wrote into RUN/ledger, what became of every group.

An attempt that begins at rollout r makes again what earlier ones did from r on: their lines of those rollouts count no
more.  What is left is one history, and in it every number below `following` is trained once, dropped once, or alive at
the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.rollout.ledger.ledger import FOLDER, AttemptBegun, HandedOver, Line, RolloutTrained, numbers_in
from hpcrl.utils.untrusted_files import SAMPLES, read_regular

_DECODER = msgspec.json.Decoder(Line)


def read_lines(data: bytes) -> list[Line]:
    """The lines of one attempt; the last is left out if a kill cut it off."""
    *whole, _ = data.split(b"\n")
    return [_DECODER.decode(line) for line in whole if line]


@dataclass
class Account:
    """following: groups issued; trained, dropped, buffer, bank: where they are (bank includes what was handed over and
    not trained);
    again: groups that an earlier attempt had trained or dropped and that a restart made again; wrong: what does not add
    up."""

    following: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    buffer: int = 0
    bank: int = 0
    attempts: int = 0
    again: int = 0
    wrong: list[str] = field(default_factory=list)


def account_of(attempts: Iterable[Iterable[Line]]) -> Account:
    """The account of a run from the lines of its attempts, in order."""
    history: list[HandedOver] = []
    trained: set[int] = set()  # rollouts
    found, base = Account(), None
    for lines in attempts:
        found.attempts += 1
        for line in lines:
            match line:
                case AttemptBegun():
                    undone = [event for event in history if event.rollout >= line.rollout]
                    history = [event for event in history if event.rollout < line.rollout]
                    trained = {rollout for rollout in trained if rollout < line.rollout}
                    found.again += sum(
                        len(numbers_in(e.batch)) + sum(len(numbers_in(r)) for r in e.dropped.values()) for e in undone
                    )
                    if not history and line.rollout:
                        base = line
                    found.wrong += _agrees(line, history)
                case HandedOver():
                    if history and line.rollout <= history[-1].rollout:
                        found.wrong.append(
                            f"rollout {line.rollout} was handed over after rollout {history[-1].rollout}"
                        )
                    history.append(line)
                case RolloutTrained():
                    trained.add(line.rollout)
    return _close(found, history, trained, base)


def _agrees(begun: AttemptBegun, history: list[HandedOver]) -> list[str]:
    """Whether an attempt begins where the history before it ends."""
    if not history:
        return []
    last = history[-1]
    if last.rollout != begun.rollout - 1:
        return [f"attempt {begun.attempt} begins at rollout {begun.rollout}, after a gap"]
    alive = {*numbers_in(last.buffer), *numbers_in(last.bank)} - set(numbers_in(last.batch))
    taken = {*numbers_in(begun.buffer), *numbers_in(begun.bank)}
    if last.following != begun.following or alive != taken:
        return [f"attempt {begun.attempt} does not go on where rollout {last.rollout} ended"]
    return []


def _close(found: Account, history: list[HandedOver], trained: set[int], base: AttemptBegun | None) -> Account:
    """Every number counted; what is not in exactly one place is named.

    base: where the run's first attempt began, if not at the start: from a checkpoint of another run, whose counts are
    believed.
    """
    places: Counter[int] = Counter()
    if base is not None:
        alive = {*numbers_in(base.buffer), *numbers_in(base.bank)}
        places.update(set(range(base.following)) - alive)
        found.following = base.following
        found.trained = base.trained
        found.dropped = dict(base.dropped)
        if not history:
            places.update(alive)
            found.buffer = len(numbers_in(base.buffer))
            found.bank = len(numbers_in(base.bank))
    for event in history:
        batch = numbers_in(event.batch)
        places.update(batch)
        found.trained += len(batch) if event.rollout in trained else 0
        found.bank += 0 if event.rollout in trained else len(batch)
        for reason, ranges in event.dropped.items():
            numbers = numbers_in(ranges)
            places.update(numbers)
            found.dropped[reason] = found.dropped.get(reason, 0) + len(numbers)
    if history:
        last, batch = history[-1], set(numbers_in(history[-1].batch))
        buffer = numbers_in(last.buffer)
        bank = [number for number in numbers_in(last.bank) if number not in batch]
        places.update(buffer + bank)
        found.following, found.buffer, found.bank = last.following, len(buffer), found.bank + len(bank)
    for number, times in sorted(places.items()):
        if times > 1:
            found.wrong.append(f"group {number} is in {times} places")
    if lost := sorted(set(range(found.following)) - places.keys()):
        found.wrong.append(f"{len(lost)} groups are nowhere, the first is {lost[0]}")
    if beyond := sorted(number for number in places if number >= found.following):
        found.wrong.append(f"group {beyond[0]} was never issued")
    return found


def account(root: str | Path) -> Account:
    """The account of the run in a directory."""
    paths = sorted((Path(root) / FOLDER).glob("attempt-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return account_of(read_lines(read_regular(path, SAMPLES)) for path in paths)
