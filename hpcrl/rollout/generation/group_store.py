"""Where groups come from and where they are kept: the source, the ledger, the progress of unfinished ones, and
the files on disk.

Invariants: what there is of a group is here and nowhere else, from when it is taken until it is handed over; what a
step of the ledger means for samples and files is done with it; a group that
counts as finished is on disk already; a snapshot says where everything stands once its rollout is trained; after going
back to an older checkpoint a group is made of what is on disk only as far as the trainer may consume it.  In
deterministic mode nothing is kept on disk: what comes after a checkpoint is made again, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.filters.custom_filters import BufferFilter
from hpcrl.rollout.ledger.bank import Bank
from hpcrl.rollout.ledger.group_progress import GroupProgress, fit, mask_older
from hpcrl.rollout.ledger.ledger import AttemptBegun, HandedOver, Journal, Ledger, RolloutTrained, numbers_in, ranges_of
from hpcrl.rollout.prompts.custom_source import CustomSource
from hpcrl.rollout.prompts.prompt_source import Group, PromptSource
from hpcrl.rollout.saved_rollouts import SavedRollouts
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir

FOLDER = "bank"
FILTERED = "buffer_filter"  #: the reason of groups that a buffer filter drops


class GroupStore:
    """The groups of one attempt, until they are handed over.

    groups: what there is of each group in flight, in the buffer or in the bank, by number.
    held: of these, what was taken: it is at work, or finished and in no batch yet.
    """

    def __init__(self, options: Options, source: PromptSource | CustomSource | SavedRollouts, rundir: RunDir) -> None:
        self._options = options
        self._source = source
        self._rundir = rundir
        replayed = options.load_debug_rollout_data is not None
        self._kept = not (options.learns_labels or options.deterministic_mode or replayed)  # on disk
        self._parts = options.partial_rollout or options.never_waits
        self._greedy = needs(options).greedy
        self.ledger = Ledger()
        self._bank = Bank(rundir.root / FOLDER)
        self._journal: Journal | None = None
        self._choose = BufferFilter(options) if options.buffer_filter_path else None
        self.groups: dict[int, GroupProgress] = {}
        self.held: set[int] = set()
        self._on_disk: set[int] = set()  # of what the source is still to hand out, after going back
        self._trained: dict[int, tuple[int, int]] = {}  # files of trained groups -> (policy that learned, oldest token)
        self._rollout = 0
        self._begins = True
        self._dropped: dict[str, list[int]] = {}

    # ---- a run begins, or resumes

    def restore(self, rollout_id: int, state: dict[str, Any] | None) -> None:
        """Stand where `state` (of the snapshot before `rollout_id`; None at the start of a run) says.

        Raises:
            DataError: if it is damaged.
        """
        if state is not None:
            self._source.restore(state)
            self.ledger = Ledger.restore(state["ledger"]) if "ledger" in state else Ledger()
            following = int(self._source.state()["next_group"])
            if self.ledger.following != following:  # of an earlier hpcrl, or another kind of source
                self.ledger = Ledger.after(following)
        self._rollout = rollout_id
        self._begins = True

    async def _load(self, version: int) -> None:
        """Look at what is on disk, now that the policy version is known."""
        self._begins = False
        kept, again = await asyncio.to_thread(self._adopt, version) if self._kept else ([], 0)
        for group in self._source.again([number for number in self.ledger.waiting if number not in self.groups]):
            again += 1
            self._hold(GroupProgress(group))
        ledger = self.ledger
        self._journal = Journal(self._rundir)
        self._journal.write(
            AttemptBegun(
                self._rundir.attempt,
                self._rollout,
                ledger.following,
                ledger.trained,
                ledger.dropped,
                ranges_of(ledger.buffer),
                ranges_of(ledger.bank),
                ranges_of(kept),
                again,
            )
        )
        if kept or again:
            say(
                f"of the groups on disk {len(kept)} that came after the checkpoint are used, {again} have to be made "
                "again"
            )

    def _adopt(self, version: int) -> tuple[list[int], int]:
        """(groups after the checkpoint that are on disk and of use, how many are of none); those files are removed."""
        alive = set(self.ledger.waiting)
        kept = []
        again = 0
        useless = []
        changed = []
        numbers = self._bank.numbers()
        wanted = [number for number in numbers if number in alive or number >= self.ledger.following]
        groups = self._source.again(wanted)
        for group in groups:
            found = self._bank.read(group)
            if found is None:
                useless.append(group.number)
                continue
            progress, lost = fit(found, version, self._options.staleness_bound, self._parts)
            again += group.number not in alive and progress.empty
            if progress.empty:
                useless.append(group.number)
            elif lost:
                changed.append(progress)
            if group.number in alive:
                self._hold(progress)
            elif not progress.empty:
                kept.append(group.number)
        self._bank.write(changed)
        self._bank.remove([*useless, *(set(numbers) - {group.number for group in groups})])
        self._on_disk = set(kept)
        return kept, again

    def _hold(self, progress: GroupProgress) -> None:
        """Keep what there is of a group of the buffer or bank, and have it in the right one of the two."""
        self.groups[progress.number] = progress
        complete = progress.complete(self._options.n_samples_per_prompt, self._greedy)
        if progress.number in self.ledger.bank and not complete:
            self.ledger.reopen(progress.number)

    # ---- taking

    async def next_groups(self, count: int, rollout_id: int, version: int, consumed: int) -> list[GroupProgress]:
        """`count` groups: what was left over first, finished (in the bank) before unfinished, then the source's next.

        Args:
            version: of the engines' policy.
            consumed: of the trainer's when it learns from `rollout_id`, as a rule the same.
        """
        if self._begins:
            await self._load(version)
        bound = self._options.staleness_bound
        bound = None if bound is None else bound - (consumed - version)
        taken = await self._waiting(count, rollout_id, version, bound)
        taken.sort(key=lambda progress: progress.number not in self.ledger.bank)
        for progress in taken:
            if progress.number in self.ledger.buffer:
                self.ledger.resume(progress.number)
        for group in self._source.next_groups(count - len(taken)):
            self.ledger.issue(group.number)
            taken.append(await self._issued(group, version, bound))
        self.groups |= {progress.number: progress for progress in taken}
        self.held |= {progress.number for progress in taken}
        return taken

    def begin_again(self, number: int) -> GroupProgress:
        """A group that was taken, in flight, and nothing of it any more."""
        if number in self.ledger.bank:
            self.ledger.reopen(number)
            self.ledger.resume(number)
        self.groups[number] = GroupProgress(self.groups[number].group)
        return self.groups[number]

    async def _waiting(self, count: int, rollout_id: int, version: int, bound: int | None) -> list[GroupProgress]:
        """At most `count` of what was left over, without what has become too old meanwhile: behind `version` by more
        than `bound`."""
        waiting = [
            fit(self.groups[number], version, bound, self._parts)[0]
            for number in self.ledger.waiting
            if number in self.groups and number not in self.held
        ]
        for progress in waiting:
            self._hold(progress)
        if not waiting:
            return []
        if self._choose is None:
            taken, dropped = waiting[:count], []
        else:
            bare = [progress for progress in waiting if progress.empty][
                :count
            ]  # as good as new: there is nothing to show to a filter
            taken, dropped = await self._choose.choose(
                rollout_id, [h for h in waiting if not h.empty], count - len(bare)
            )
            taken = bare + taken
        self.drop([progress.number for progress in dropped], FILTERED)
        return taken

    async def _issued(self, group: Group, version: int, bound: int | None) -> GroupProgress:
        """A group of the source, with what an earlier attempt has left of it on disk."""
        if group.number in self._on_disk:
            self._on_disk.remove(group.number)
            if (progress := await asyncio.to_thread(self._bank.read, group)) is not None:
                return fit(progress, version, bound, self._parts)[0]
        return GroupProgress(group)

    # ---- keeping

    async def write(self, progress: GroupProgress) -> None:
        """Have what there is of a group on disk."""
        if self._kept and not progress.empty:
            await self._bank.keep(progress)

    async def put_back(self, numbers: Sequence[int]) -> None:
        """These were worked on and are not finished, or are finished and not needed: they wait, on disk."""
        working = [number for number in numbers if number in self.ledger.in_flight]  # else it is on disk
        await asyncio.gather(*(self.write(self.groups[number]) for number in working))
        for number in working:
            self.ledger.put_back(number)
        self.held -= set(numbers)

    def drop(self, numbers: Iterable[int], reason: str) -> None:
        for number in numbers:
            self.ledger.drop(number, reason)
            self._dropped.setdefault(reason, []).append(number)
            self._forget(number)
            if self._kept:
                self._bank.remove([number])

    def _forget(self, number: int) -> None:
        del self.groups[number]
        self.held.discard(number)

    # ---- the trainer's side

    def hand_over(
        self, rollout_id: int, numbers: Iterable[int], version: int, consumed: int
    ) -> tuple[Rollout, HandedOver]:
        """The rollout of these groups, which are finished and go to the trainer; what is written down of it.

        Args:
            version: of the policy that the rollout is for.
            consumed: of the trainer's when it learns from it.
        """
        ledger = self.ledger
        options = self._options
        batch = [self.groups[number] for number in sorted(numbers)]
        rollout = Rollout(rollout_id, version, [progress.group for progress in batch], options.n_samples_per_prompt)
        for progress in batch:
            for samples in progress.finished.values():
                rollout.add(mask_older(samples, version) if options.mask_offpolicy_in_partial_rollout else samples)
            ledger.claim(progress.number, rollout_id)
            self._forget(progress.number)
            if self._kept and (span := progress.versions()) is not None:
                self._trained[progress.number] = consumed, span[0]
        dropped = {reason: ranges_of(numbers) for reason, numbers in self._dropped.items()}
        self._dropped = {}
        buffer = ledger.buffer | ledger.in_flight  # where a restart finds what is in flight
        before = {
            number for number, rollout in ledger.claimed.items() if rollout < rollout_id
        }  # handed over, not yet trained
        line = HandedOver(
            rollout_id,
            ledger.following,
            ranges_of(progress.number for progress in batch),
            dropped,
            ranges_of(buffer),
            ranges_of(ledger.bank - before),
        )
        self._write(line)
        return rollout, line

    async def replay(self, line: HandedOver, version: int, source: dict[str, Any]) -> list[Group]:
        """Stand where an earlier attempt stood once it had handed over the rollout of `line`; the groups of its batch.

        Args:
            source: the state of the source then.
        """
        if self._begins:
            await self._load(version)
        self._source.restore(source)
        batch = numbers_in(line.batch)
        dropped = dict(self.ledger.dropped)
        for reason, ranges in line.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + len(numbers_in(ranges))
        places = set(numbers_in(line.buffer)), set(numbers_in(line.bank))
        claimed = dict.fromkeys(batch, line.rollout)
        self.ledger = Ledger(line.following, set(), *places, claimed, self.ledger.trained, dropped)
        self._write(line)
        return self._source.again(batch)

    def state(self, rollout_id: int) -> dict[str, Any]:
        """Where everything stands once `rollout_id` is trained, as plain JSON."""
        ledger = self.ledger.state(rollout_id)
        alive = [*ledger["buffer"], *ledger["bank"]]
        return self._source.state(alive) | {"rollout_id": rollout_id, "ledger": ledger}

    def train(self, rollout_id: int, saved: int) -> None:
        """`learned`, and the files are gone."""
        self.remove(self.learned(rollout_id, saved))

    def remove(self, numbers: list[int]) -> None:
        """Remove files of groups; this alone may be done in a thread, concurrently with everything else."""
        self._bank.remove(numbers)

    def learned(self, rollout_id: int, saved: int) -> list[int]:
        """The trainer has learned from `rollout_id`.

        Args:
            saved: the policy version of its newest checkpoint. Groups whose files are of no use.
        """
        self.ledger.train(rollout_id)
        self._write(RolloutTrained(rollout_id))
        if self._journal is not None:
            self._journal.summarize(self.ledger)
        # of use to a run that goes back to that checkpoint is only what it had not learned from, and what its policy
        # sampled
        spent = [number for number, (version, oldest) in self._trained.items() if version < saved or oldest > saved]
        spent = [number for number in spent if number not in self.ledger.bank]
        for number in spent:
            del self._trained[number]
        return spent

    def _write(self, line: HandedOver | RolloutTrained) -> None:
        if self._journal is not None:
            self._journal.write(line)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
