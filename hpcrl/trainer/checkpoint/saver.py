"""Saving during training, at once or in the background, and the removal of old checkpoints.

    saver = Saver(policy, ranks, directory, run_id, options, also)
    saver.save(position)           # with --async-save a separate process writes the files, but not those of `also`
    saver.poll()                   # between steps: names the checkpoint in the tracker once all ranks have written
    saver.finish()                 # before the run ends: waits, with a deadline

Invariants: the tracker names a checkpoint only when every rank's files are on disk; old checkpoints are removed only
after that; one that another run saved is never removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.errors import DataError, DeadlineError
from hpcrl.trainer.checkpoint import save_load
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.checkpoint.writers import CheckpointWriter
from hpcrl.trainer.collectives import agree, agree_in_step, device
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.parallel_state import Ranks


@dataclass
class PendingSave:
    """A checkpoint that is being written.

    Attributes:
        writer: this rank's, or None if it has nothing to write.
    """

    staging: Path
    final: Path
    position: Position
    finalize: list[Callable[[], None]]
    writer: CheckpointWriter | None


@dataclass
class Saver:
    """The checkpoints of one run, on one rank; every method is collective.

    Attributes:
        saved: the newest that is whole, of this attempt's.
    """

    policy: Policy
    ranks: Ranks
    directory: Path
    run_id: str
    options: Options
    also: Callable[[Position, Path], None] = save_load.nothing
    pending: PendingSave | None = None
    saved: Position | None = None

    def save(self, position: Position, *, wait: bool = False) -> Path:
        """Save now, or begin to (--async-save and not wait); an earlier save is finished first.

        Raises:
            HpcrlError: if it fails.
        """
        self.finish()
        if self.options.async_save and not wait:
            return self._start_save(position)
        path = save_load.save(self.policy, self.ranks, self.directory, position, self.run_id, self.also)
        self.saved = position
        self._prune()
        return path

    def poll(self) -> Path | None:
        """Commit the pending checkpoint if every rank has written its part: its path then, else None.

        Raises:
            HpcrlError: if it failed.
        """
        if self.pending is None:
            return None
        writer = self.pending.writer
        busy = torch.tensor([writer is not None and not writer.done()], dtype=torch.int32, device=device())
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        return None if busy.item() else self._commit()

    def finish(self) -> Path | None:
        """Wait for the pending checkpoint.

        Raises:
            DeadlineError: after --distributed-timeout-minutes.
        """
        if self.pending is None:
            return None
        minutes = self.options.distributed_timeout_minutes
        path, writer = self.pending.final, self.pending.writer

        def wait() -> None:
            if writer is not None and not writer.wait(60 * minutes):
                raise DeadlineError(
                    f"checkpoint {path} was not written within {minutes} minutes",
                    "raise --distributed-timeout-minutes, or is the file system stuck?",
                )

        agree(wait)
        return self._commit()

    def _start_save(self, position: Position) -> Path:
        final = save_load.step(self.directory, position.rollout_id)
        if save_load.is_latest(final):
            self.saved = position
            return final
        with save_load.name_checkpoint_in_error(final):
            staging = save_load.prepare(final, self.ranks)
            self.also(position, staging)
            state = save_load.everything(self.policy, self.ranks, position)
            request = save_load.plan(state, staging)
            writer = agree(lambda: CheckpointWriter(request) if request.async_fn is not None else None)
        self.pending = PendingSave(staging, final, position, request.finalize_fns, writer)
        return final

    def _commit(self) -> Path:
        pending = self.pending
        self.pending = None
        with save_load.name_checkpoint_in_error(pending.final):
            agree(pending.writer.hand_over if pending.writer else lambda: None)
            for finalize in pending.finalize:  # gathers what was written where, and writes .metadata
                agree_in_step(finalize)
            save_load.commit(pending.staging, pending.final, pending.position, self.run_id, self.ranks)
        self.saved = pending.position
        self._prune()
        return pending.final

    def _prune(self) -> None:
        if self.ranks.rank == 0:
            prune(self.directory, self.run_id, self.options.save_keep_last, self.options.save_retain_interval)


def prune(directory: Path, run_id: str, keep_last: int | None, retain_interval: int | None) -> list[Path]:
    """Remove old checkpoints of run `run_id`; those that went.

    A checkpoint loses its name before its files, so none is ever half there.

    Args:
        keep_last: the newest that stay (None: 1 with retain_interval, else all).
        retain_interval: those whose number it divides stay too.
    """
    if keep_last is None and retain_interval is None:
        return []
    newest = save_load.latest(directory)
    mine = [path for path in sorted(directory.glob("iter_*")) if _is_of(path, run_id)]
    if newest is not None:  # later ones are damaged, or of a history that is no more: they do not count
        mine = [path for path in mine if path.name <= newest.name]
    old = mine[: -(keep_last or 1)]
    gone = []
    for path in old:
        number = int(path.name.removeprefix("iter_"))
        if path == newest or path.is_symlink() or (retain_interval and number % retain_interval == 0):
            continue
        os.rename(path, aside := path.with_name(f".deleted-{path.name}"))
        shutil.rmtree(aside, ignore_errors=True)
        gone.append(path)
    return gone


def _is_of(path: Path, run_id: str) -> bool:
    """Whether a run saved a checkpoint, as far as can be told."""
    try:
        return save_load.saved_by(path) == run_id
    except DataError:
        return False
