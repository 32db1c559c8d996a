"""Copies of the trainer's state in the memory of hosts, between checkpoints on disk (--non-persistent-save-interval).

    copies = MemoryCopies(...)
    copies.start_copy(position) # after a step: the state as it is now; a forked process writes it
    copies.advance()            # now and then: what each rank has written goes to its partner's host
    copies.settle(rollouts)     # before a step is recorded after which the next copy is due: the last one is done

A copy is a checkpoint as `save_load.py` writes it, whose files lie in /dev/shm: each rank's own on its host, and once
more on the host of its partner, so that the death of all ranks, or of any one host, leaves every part.  A resumed run
puts the newest complete copy on disk and resumes from there (`from_memory.py`): what is checked, what fits which
layout, and what follows a checkpoint are the same.

Weighed and not taken: nvidia-resiliency-ext's LocalCheckpointManager stores whole objects by torch.save and unpickles
them, and loads into the same layout alone; a memory store for torch's distributed checkpoints lives in a trainer
process and dies with it, while its file writer, which Megatron uses, writes to tmpfs as well as to a disk.

Invariants: no step is recorded before the copy from --non-persistent-save-interval steps earlier is in both places, so
that no fault costs more of them; training waits for its files only there, and beyond half of the group's timeout not at
all; an older copy goes only once every rank has the newer one in both places; a copy that fails is said and costs the
run nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from hpcrl.errors import HpcrlError
from hpcrl.run.copies_directory import copies_here
from hpcrl.run.role import RoleContext, say
from hpcrl.run.rundir import write_unread
from hpcrl.trainer.checkpoint import copy_files, save_load
from hpcrl.trainer.checkpoint.copies_plan import Part, partners, senders
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.checkpoint.whole import manifest
from hpcrl.trainer.checkpoint.writers import CheckpointWriter
from hpcrl.trainer.collectives import agree, agree_in_step, device, gather_json, is_alone
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.utils.waiting import Deadline

if TYPE_CHECKING:
    from hpcrl.trainer.loop_watchers import LoopEvent

POSITION = "position.json"  #: of rank 0's part: the record of the checkpoint
ENDING = 30.0  #: seconds for which the end of a run waits for a copy that is on its way


@dataclass
class PendingCopy:
    """A copy that is being written.

    Attributes:
        writer: this rank's process, None if it has nothing to write, or has handed over.
        finalize: what all ranks do together once all have written.
        threads: that send and receive, once `finalize` is done.
        failed: what went wrong in them.
        late: whether it was waited for in vain.
    """

    position: Position
    directory: Path
    writer: CheckpointWriter | None
    finalize: list[Callable[[], None]]
    threads: list[threading.Thread] = field(default_factory=list)
    failed: list[Exception] = field(default_factory=list)
    late: bool = False

    def busy(self) -> bool:
        """Whether this rank is still at it."""
        if self.threads:
            return any(thread.is_alive() for thread in self.threads)
        return self.writer is not None and not self.writer.done()

    def wait(self, deadline: Deadline) -> None:
        """Wait until this rank is not, but no longer than that."""
        for thread in self.threads:
            thread.join(deadline.left)
        if self.writer is not None:
            self.writer.wait(deadline.left)


class MemoryCopies:
    """The copies of one attempt, on one rank; every method is collective.

    Args:
        copies: the directory of this host.
        hosts: of each rank, in rank order.
        interval: rollouts from one copy to the next; 0: none are taken.
        also: writes more into a directory (`Saver`).
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        copies: Path,
        hosts: Sequence[str],
        run_id: str,
        attempt: int,
        minutes: int,
        interval: int,
        also: Callable[[Position, Path], None] = save_load.nothing,
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._copies = copies
        self._origin = run_id, attempt
        self._interval = interval
        self._also = also
        self._partner = partners(hosts)[ranks.rank]
        self._senders = senders(hosts, ranks.rank)
        several = interval > 0 and len(set(hosts)) > 1
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes)) if several else None
        self._division = save_load.division() if interval > 0 else None
        if interval > 0:
            gc.freeze()  # Megatron looks for garbage at each copy: not among all that is here by now
        self._patience = 30.0 * minutes
        self._pending: PendingCopy | None = None
        self._spent = 0.0
        self.newest = 0  #: rollouts of the newest copy that all ranks have

    def observe(self, event: LoopEvent) -> None:
        """Bring the copy that is on its way further, and begin one that is due and not on disk."""
        every, rollouts = self._interval, event.at.rollout_id
        if event.done in ("fetched", "trained"):
            self.advance()
        elif event.done == "stepped":
            self.settle(rollouts)
            event.metrics.update(self.spent())
        elif event.done == "rested" and not event.on_disk and every and rollouts % every == 0:
            with self._timed():
                self.start_copy(event.at)

    def start_copy(self, position: Position) -> bool:
        """Take a copy, unless one is on its way still; whether it was begun."""
        self._advance()
        if self._pending is not None:
            return False
        directory = copy_files.part_directory(self._copies, position.rollout_id, self._ranks.rank)

        def make() -> None:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True, mode=0o700)

        def take() -> PendingCopy:
            agree(make)
            self._also(position, directory)
            state = save_load.everything(self._policy, self._ranks, position)
            request = save_load.plan(state, directory, self._division)
            writer = agree(lambda: CheckpointWriter(request) if request.async_fn is not None else None)
            return PendingCopy(position, directory, writer, request.finalize_fns)

        self._pending = self._guarded(position.rollout_id, take)
        if self._pending is None:
            self._drop(position.rollout_id)
        return self._pending is not None

    def advance(self) -> bool:
        """Do what is to be done next for the copy that is on its way, if all ranks are ready for it.

        Returns:
            Whether one is on its way still.
        """
        with self._timed():
            self._advance()
        return self._pending is not None

    def settle(self, rollouts: int) -> None:
        """Wait for the copy that is on its way, if the next one is due after so many rollouts."""
        if self._pending is None or self._pending.late or rollouts % self._interval:
            return
        with self._timed():
            self._complete(self._patience)
        if self._pending is not None:
            self._pending.late = True
            if self._pending.writer is not None:
                self._pending.writer.end_late()
            if self._ranks.rank == 0:
                what = f"the copy of the state after {self._pending.position.rollout_id} rollouts"
                say(f"note: {what} was not in memory within {self._patience:.0f} s: training continues without it")

    def finish(self) -> None:
        """Wait for the copy that is on its way, as long as it may take at the end of a run."""
        self._complete(ENDING)

    def spent(self) -> dict[str, float]:
        """The metric of the seconds that training has waited for copies, since it was last asked for."""
        seconds, self._spent = self._spent, 0.0
        return {"perf/memory_copy_time": seconds} if self._interval else {}

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._spent += time.monotonic() - begun

    def _complete(self, seconds: float) -> None:
        """Bring the copy that is on its way to its end, if that comes within `seconds`."""
        deadline = Deadline(seconds)
        while (pending := self._pending) is not None:
            sending = bool(pending.threads)
            pending.wait(deadline)
            self._advance()
            if self._pending is pending and sending == bool(pending.threads):  # a rank has not done its part
                return

    def _advance(self) -> None:
        if (pending := self._pending) is None:
            return
        busy = torch.tensor([pending.busy()], dtype=torch.int32, device=device())
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        if busy.item():
            return
        done = pending.threads or None
        following = self._guarded(
            pending.position.rollout_id, lambda: self._finish_copy(pending) if done else self._hand(pending)
        )
        self._pending = None if done or following is None else pending
        if following is None:
            self._drop(pending.position.rollout_id)

    def _drop(self, rollout_id: int) -> None:
        """Remove what there is of a copy that failed."""
        for rank in (self._ranks.rank, *self._senders):
            copy_files.remove_part(self._copies, rollout_id, rank)

    def _guarded(self, rollout_id: int, work: Callable[[], Any]) -> Any:
        """The result of `work`; None if it failed, on all ranks alike."""
        try:
            return work()
        except HpcrlError as error:
            if is_alone(error):
                raise
            if self._ranks.rank == 0:
                say(f"note: the state after {rollout_id} rollouts is not copied into memory: {error.what}")
            return None

    def _hand(self, pending: PendingCopy) -> PendingCopy:
        """All ranks have written: complete the checkpoint, and send the parts."""
        writer = pending.writer
        pending.writer = None
        agree(writer.hand_over if writer is not None else lambda: None)
        for finalize in pending.finalize:
            agree_in_step(finalize)
        agree(lambda: self._write_position(pending), self._ranks.rank == 0)
        receive = partial(copy_files.receive_part, self._copies, group=self._group)
        jobs = [partial(self._send, pending), *(partial(receive, source) for source in self._senders)]
        for job in jobs:
            pending.threads.append(threading.Thread(target=self._run, args=(pending, job), name="copies", daemon=True))
            pending.threads[-1].start()
        return pending

    def _write_position(self, pending: PendingCopy) -> None:
        write_unread(pending.directory / POSITION, msgspec.json.encode(pending.position))

    def _run(self, pending: PendingCopy, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  (told to all ranks by the next look)
            pending.failed.append(error)

    def _send(self, pending: PendingCopy) -> None:
        """Sum up this rank's part, and send it to its partner."""
        at = pending.position
        run_id, attempt = self._origin
        files = manifest(pending.directory, pieces=True)
        world = dist.get_world_size()
        part = Part(run_id, at.rollout_id, at.version, attempt, self._ranks.rank, world, files)
        copy_files.write_index(pending.directory, part)
        if self._partner is not None and self._group is not None:
            copy_files.send_part(pending.directory, part, self._partner, self._group)

    def _finish_copy(self, pending: PendingCopy) -> PendingCopy:
        """All ranks have it in both places, or one has failed; older copies go."""

        def told() -> None:
            if pending.failed:
                raise pending.failed[0]

        agree(told)
        for rank in (self._ranks.rank, *self._senders):
            copy_files.remove_other(self._copies, rank, pending.position.rollout_id)
        self.newest = pending.position.rollout_id
        return pending


def open_copies(
    context: RoleContext, policy: Policy, ranks: Ranks, also: Callable[[Position, Path], None]
) -> MemoryCopies:
    """The copies of this attempt: none, if they are not wanted, or a host has no directory for them; collective."""
    interval = context.options.non_persistent_save_interval
    copies = copies_here()
    hosts = [place.host for place in context.plan.trainers]
    if interval:
        if (
            copies is not None
        ):  # the run stands at a checkpoint on disk now: all ranks are behind it, and before the next
            copy_files.clear(copies)
        there = gather_json(copies is not None)
        without = [host for host, found in zip(hosts, there, strict=True) if not found]
        if without and ranks.rank == 0:
            say(f"note: no copies are kept in memory: {without[0]} has no directory for them")
        interval = 0 if without else interval
    run_id, attempt, minutes = context.plan.run_id, context.plan.attempt, context.options.distributed_timeout_minutes
    return MemoryCopies(policy, ranks, copies or Path(), hosts, run_id, attempt, minutes, interval, also)
