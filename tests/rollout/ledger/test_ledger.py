"""The ledger's law, how batches fill, and the account of a run: random schedules over the pure parts, and each rule by
itself."""

from __future__ import annotations

import copy
import gc
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from hpcrl.errors import DataError
from hpcrl.rollout.generation.batch_policies import BatchSelection
from hpcrl.rollout.ledger.ledger import (
    OTHER,
    REASONS,
    AttemptBegun,
    HandedOver,
    Ledger,
    Line,
    RolloutTrained,
    numbers_in,
    ranges_of,
)
from tests.support.ledger_account import account_of, read_lines

SCHEDULES = 10_000


def issue(filling: BatchSelection, numbers: Iterable[int]) -> None:
    for number in numbers:
        filling.issue(number)


@dataclass
class Run:
    """A run without samples: batches fill at random, engines die, filters refuse, attempts are killed and go back to a
    checkpoint.

    What it believes of groups is kept apart from the ledger: `trained` and `dropped` are what the effective history did
    to each.
    """

    chance: random.Random
    ledger: Ledger = field(default_factory=Ledger)
    rollout: int = 0
    trained: dict[int, int] = field(default_factory=dict)  # group -> rollout
    dropped: dict[int, int] = field(default_factory=dict)
    attempts: list[list[Line]] = field(default_factory=list)
    checkpoints: dict[int, dict[str, Any]] = field(default_factory=dict)  # the rollout to go on at -> state

    def __post_init__(self) -> None:
        self.wanted = self.chance.randint(1, 4)
        self.at_once = self.wanted + self.chance.randint(0, 3)
        self.partial = self.chance.random() < 0.6
        self.ordered = not self.partial and self.chance.random() < 0.5
        self.refuses = self.chance.choice([0, 0, 0.3, 0.6])
        self.seconds = self.chance.random() < 0.3
        self.held: set[int] = set()  # of this rollout
        self.checkpoints[0] = self.ledger.state(-1)
        self.begin(0)

    def begin(self, rollout: int) -> None:
        """An attempt: the ledger as the checkpoint has it."""
        self.ledger = Ledger.restore(msgspec.json.decode(msgspec.json.encode(self.checkpoints[rollout])))
        self.rollout = rollout
        self.trained = {group: at for group, at in self.trained.items() if at < rollout}
        self.dropped = {group: at for group, at in self.dropped.items() if at < rollout}
        for number in sorted(self.ledger.bank):
            if self.chance.random() < 0.2:  # its file is lost, or too old
                self.ledger.reopen(number)
        ledger = self.ledger
        buffer, bank = ranges_of(ledger.buffer), ranges_of(ledger.bank)
        begun = AttemptBegun(
            len(self.attempts), rollout, ledger.following, ledger.trained, ledger.dropped, buffer, bank
        )
        self.attempts.append([begun])

    def drop(self, number: int, reason: str, lost: dict[str, list[int]]) -> None:
        self.ledger.drop(number, reason)
        assert number not in self.dropped and number not in self.trained
        self.dropped[number] = self.rollout
        lost.setdefault(reason, []).append(number)

    def step(self, dies: bool) -> bool:
        """One rollout, trained; False if the attempt is killed somewhere in it."""
        chance = self.chance
        ledger = self.ledger
        lost = {}
        self.held = set()
        filling = BatchSelection(self.wanted, self.at_once, self.ordered)
        killed_at = chance.randint(0, 12) if dies else -1
        in_flight: list[int] = []
        while not filling.full:
            killed_at -= 1
            if dies and killed_at < 0:
                return False
            if count := filling.due():
                self._issue(count, filling, in_flight, lost)
                continue
            number = in_flight.pop(chance.randrange(len(in_flight)))
            if chance.random() < 0.1:  # its engine died: it is asked again
                in_flight.append(number)
                continue
            self._judge(number, filling)
        outcome = self._settle(filling, in_flight, lost)
        alive = ranges_of(ledger.buffer), ranges_of(ledger.bank)
        dropped = {reason: ranges_of(numbers) for reason, numbers in lost.items()}
        self.attempts[-1].append(HandedOver(self.rollout, ledger.following, ranges_of(outcome), dropped, *alive))
        state = ledger.state(self.rollout)
        if dies:
            return False  # handed over, and never trained
        for number in ledger.train(self.rollout):
            assert number not in self.trained and number not in self.dropped, "trained twice"
            self.trained[number] = self.rollout
        assert ledger.state(self.rollout) == state, "the snapshot told what training would do"
        self.attempts[-1].append(RolloutTrained(self.rollout))
        self.rollout += 1
        if chance.random() < 0.6:
            self.checkpoints[self.rollout] = state
        return True

    def _issue(self, count: int, filling: BatchSelection, in_flight: list[int], lost: dict[str, list[int]]) -> None:
        ledger, chance = self.ledger, self.chance
        waiting = [number for number in ledger.waiting if number not in self.held]
        if self.partial and chance.random() < 0.3:  # a buffer filter: some later, some never
            chance.shuffle(waiting)
            if waiting and chance.random() < 0.3:
                self.drop(waiting.pop(), "buffer_filter", lost)
        for number in waiting[:count]:
            filling.issue(number)
            self.held.add(number)
            if number in ledger.bank:
                filling.keep(number)
            else:
                ledger.resume(number)
                in_flight.append(number)
            count -= 1
        for number in range(ledger.following, ledger.following + count):
            ledger.issue(number)
            filling.issue(number)
            self.held.add(number)
            in_flight.append(number)

    def _judge(self, number: int, filling: BatchSelection) -> None:
        if self.chance.random() < self.refuses:
            filling.refuse(number, self.chance.choice(["zero_std_0.0", "zero_std_1.0"]), second=self.seconds)
        else:
            self.ledger.finish(number)
            filling.keep(number)

    def _settle(self, filling: BatchSelection, in_flight: list[int], lost: dict[str, list[int]]) -> list[int]:
        """As the generator does it; the batch."""
        ledger = self.ledger
        for number in list(in_flight):
            if self.partial and self.chance.random() < 0.3:  # finished just before it was told to end
                in_flight.remove(number)
                self._judge(number, filling)
        outcome = filling.batch()
        assert len(outcome.groups) == self.wanted
        for number, reason in outcome.dropped.items():
            self.drop(number, reason, lost)
        for number in outcome.groups:
            if number in ledger.in_flight:
                ledger.finish(number)
            ledger.claim(number, self.rollout)
        for number in (*in_flight, *outcome.surplus):
            if not self.partial:
                self.drop(number, "surplus", lost)
            elif number in ledger.in_flight:
                ledger.put_back(number)
        return outcome.groups

    def check(self) -> None:
        ledger = self.ledger
        assert ledger.holds()
        alive = ledger.buffer | ledger.bank | ledger.in_flight
        assert sorted([*alive, *self.trained, *self.dropped]) == list(range(ledger.following)), (
            "nothing lost, nothing twice"
        )
        assert len(self.trained) == ledger.trained and len(self.dropped) == sum(ledger.dropped.values())


def test_random_schedules() -> None:
    """Over random schedules nothing is lost and nothing is trained twice."""
    restarts = 0
    for seed in range(SCHEDULES):
        run = Run(random.Random(seed))
        for _ in range(run.chance.randint(1, 4)):
            if not run.step(dies=run.chance.random() < 0.25):
                run.begin(run.chance.choice(sorted(run.checkpoints)[-2:]))
                run.checkpoints = {at: state for at, state in run.checkpoints.items() if at <= run.rollout}
                restarts += 1
            run.check()
        account = account_of(run.attempts)
        assert not account.wrong, (seed, account.wrong)
        assert account.following == sum((account.trained, account.buffer, account.bank, *account.dropped.values()))
        assert account.trained == sum(1 for at in run.trained.values() if at < run.rollout)
    assert restarts > SCHEDULES / 4


def test_ordered_batch_depends_on_verdicts() -> None:
    """In order, the batch depends on the verdicts alone."""
    for seed in range(500):
        chance = random.Random(seed)
        wanted, at_once = chance.randint(1, 5), chance.randint(5, 9)
        verdicts = [chance.choice(["keep", "keep", "refuse", "second"]) for _ in range(400)]
        found = []
        for _ in range(3):
            filling = BatchSelection(wanted, at_once, ordered=True)
            in_flight = []
            issued = 0
            while not filling.full:
                if count := filling.due():
                    issue(filling, range(issued, issued + count))
                    in_flight += range(issued, issued + count)
                    issued += count
                    continue
                number = in_flight.pop(chance.randrange(len(in_flight)))
                if verdicts[number] == "keep":
                    filling.keep(number)
                else:
                    filling.refuse(number, "no", second=verdicts[number] == "second")
            outcome = filling.batch()
            found.append((issued, outcome.groups, list(outcome.dropped)))
        assert found[0] == found[1] == found[2]


def test_a_batch_is_full_with_the_first_that_are_kept() -> None:
    filling = BatchSelection(2, 3, ordered=False)
    assert filling.due() == 3
    issue(filling, [7, 8, 9])
    filling.refuse(8, "zero_std_1.0")
    assert not filling.due() and filling.missing == 2, "the two in flight may still fill it"
    filling.keep(9)
    filling.refuse(7, "zero_std_0.0")
    assert filling.due() == 3
    issue(filling, [10, 11, 12])
    filling.keep(12)
    assert filling.full and filling.in_flight == 2
    filling.keep(10)
    outcome = filling.batch()
    assert (outcome.groups, outcome.surplus) == ([9, 12], [10])
    assert outcome.dropped == {8: "zero_std_1.0", 7: "zero_std_0.0"}
    for number in (7, 9, 99):
        with pytest.raises(ValueError, match=f"group {number} is not in flight"):
            filling.keep(number)


def test_refused_groups_fill_a_batch() -> None:
    """Refused groups fill a batch only if their filter allows it and nothing is in flight."""
    filling = BatchSelection(2, 3, ordered=False)
    issue(filling, [0, 1, 2])
    filling.refuse(0, "zero", second=True)
    filling.refuse(1, "zero", second=True)
    assert not filling.full and not filling.due()
    filling.keep(2)
    assert filling.full and filling.batch().groups == [0, 2]
    assert filling.batch().dropped == {1: "zero"}


def test_a_step_that_is_none_is_refused() -> None:
    ledger = Ledger()
    ledger.issue(0)
    for step in (
        lambda: ledger.issue(0),
        lambda: ledger.issue(5),
        lambda: ledger.resume(0),
        lambda: ledger.reopen(0),
        lambda: ledger.claim(0, 0),
        lambda: ledger.drop(3, "x"),
    ):
        with pytest.raises(ValueError, match="group"):
            step()
    ledger.finish(0)
    ledger.claim(0, 0)
    for step in (lambda: ledger.drop(0, "x"), lambda: ledger.claim(0, 1), lambda: ledger.reopen(0)):
        with pytest.raises(ValueError, match="is for rollout 0"):
            step()
    assert ledger.train(0) == [0] and ledger.train(0) == [] and ledger.holds()


def test_a_state_is_of_one_rollout() -> None:
    """What later rollouts have claimed is in the bank of an earlier one's state, and trained in their own; what is in
    flight is in the buffer."""
    ledger = Ledger()
    for number in range(7):
        ledger.issue(number)
    for number in (0, 1, 2, 3):
        ledger.finish(number)
    ledger.put_back(4)
    for number, rollout in ((0, 5), (1, 6), (2, 7)):
        ledger.claim(number, rollout)
    for rollout, bank, trained in ((4, [0, 1, 2, 3], 0), (5, [1, 2, 3], 1), (6, [2, 3], 2), (7, [3], 3), (9, [3], 3)):
        state = ledger.state(rollout)
        assert (state["bank"], state["trained"]) == (bank, trained)
        assert state["buffer"] == [4, 5, 6] and state["following"] == 7
    assert ledger.waiting == [3, 4]
    assert ledger.train(6) == [0, 1] and ledger.trained == 2 and ledger.holds()
    assert ledger.train(6) == [] and ledger.train(8) == [2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer", {0, 3}),  # one that is in flight
        ("buffer", {3}),  # the same, in the place of one that is then nowhere
        ("bank", {3}),
        ("bank", {1, 0}),
        ("claimed", {3: 0}),  # one that is not in the bank
        ("trained", 1),
        ("following", 5),
        ("dropped", {"x": 2}),
    ],
)
def test_the_law_sees_each_breach(name: str, value: Any) -> None:
    """A group in two places or in none, and one that is claimed from nowhere."""
    ledger = Ledger()
    for number in range(4):
        ledger.issue(number)
    ledger.put_back(0)
    ledger.finish(1)
    ledger.drop(2, "x")
    assert ledger.holds()
    setattr(ledger, name, value)
    assert not ledger.holds()


def test_reasons_are_bounded() -> None:
    """A filter that invents reasons has the rest of them counted as one."""
    ledger = Ledger()
    for number in range(REASONS + 20):
        ledger.issue(number)
        ledger.drop(number, f"reason {number}")
    assert len(ledger.dropped) == REASONS + 1 and ledger.dropped[OTHER] == 20
    ledger.issue(REASONS + 20)
    ledger.drop(REASONS + 20, "reason 3")
    assert ledger.dropped["reason 3"] == 2 and ledger.holds()


@pytest.mark.parametrize(
    "damage",
    [{"following": 9}, {"buffer": [0, 0, 77]}, {"trained": "x"}, {"dropped": None}, {"bank": [2], "buffer": [2]}],
    ids=str,
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    ledger = Ledger()
    for number in range(4):
        ledger.issue(number)
    ledger.drop(1, "zero")
    ledger.finish(2)
    state = ledger.state(0)
    assert Ledger.restore(state).state(0) == state
    with pytest.raises(DataError, match="the checkpoint's ledger"):
        Ledger.restore(state | damage)


def test_the_account_names_what_is_lost_or_twice() -> None:
    good: list[Line] = [
        AttemptBegun(0, 0, 0, 0, {}, [], []),
        HandedOver(0, 4, [[0, 1]], {"zero": [[3, 3]]}, [[2, 2]], [[0, 1]]),
        RolloutTrained(0),
        HandedOver(1, 6, [[2, 2], [4, 4]], {}, [[5, 5]], [[2, 2], [4, 4]]),
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in good)
    assert read_lines(data + b'{"event":"tra') == good
    found = account_of([good])
    assert not found.wrong and (found.trained, found.bank, found.buffer, found.dropped) == (2, 2, 1, {"zero": 1})

    def wrong(change: Any) -> str:
        lines = copy.deepcopy(good)
        change(lines)
        return "; ".join(account_of([lines]).wrong)

    assert "group 0 is in 2 places" in wrong(lambda lines: lines[3].batch.append([0, 0]))
    assert "1 groups are nowhere" in wrong(lambda lines: lines[1].dropped.clear())
    assert "group 8 was never issued" in wrong(lambda lines: lines[3].buffer.append([8, 8]))
    again = [
        AttemptBegun(1, 1, 4, 2, {"zero": 1}, [[2, 2]], []),
        HandedOver(1, 5, [[2, 2], [4, 4]], {}, [], [[2, 2], [4, 4]]),
        RolloutTrained(1),
    ]
    found = account_of([good, again])
    assert not found.wrong and (found.trained, found.again, found.following) == (4, 2, 5)
    other = [
        AttemptBegun(0, 7, 4, 3, {}, [[2, 2]], []),
        HandedOver(7, 5, [[2, 2], [4, 4]], {}, [], [[2, 2], [4, 4]]),
        RolloutTrained(7),
    ]
    found = account_of([other])
    assert not found.wrong and (found.trained, found.following) == (5, 5), "begun from a checkpoint of another run"
    assert "not go on where" in "; ".join(account_of([good, [AttemptBegun(1, 1, 4, 2, {}, [], [])]]).wrong)
    assert "after a gap" in "; ".join(account_of([good, [AttemptBegun(1, 3, 6, 2, {}, [], [])]]).wrong)


def test_ranges() -> None:
    assert ranges_of([5, 1, 2, 9, 3]) == [[1, 3], [5, 5], [9, 9]]
    assert numbers_in([[1, 3], [5, 5]]) == [1, 2, 3, 5] and ranges_of([]) == []


def test_memory_stays_flat_over_many_groups() -> None:
    ledger = Ledger()
    wanted = 32
    sizes = []
    tracemalloc.start()
    for rollout in range(100_000 // 48):
        filling = BatchSelection(wanted, 48, ordered=False)
        issue(filling, range(ledger.following, ledger.following + 48))
        for number in range(ledger.following, ledger.following + 48):
            ledger.issue(number)
            if number % 3:
                ledger.finish(number)
                filling.keep(number)
            else:
                filling.refuse(number, f"reason_{number}")
        outcome = filling.batch()
        for number, reason in outcome.dropped.items():
            ledger.drop(number, reason)
        for number in outcome.surplus:
            ledger.drop(number, "surplus")
        for number in outcome.groups:
            ledger.claim(number, rollout)
        ledger.train(rollout)
        if rollout in (400, 2000):
            gc.collect()
            traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/hpcrl/*")])
            sizes.append(sum(trace.size for trace in traces.statistics("filename")))
    tracemalloc.stop()
    assert ledger.holds() and len(ledger.dropped) == REASONS + 1 and ledger.dropped[OTHER] > 0
    assert sizes[1] - sizes[0] < 20_000, sizes
