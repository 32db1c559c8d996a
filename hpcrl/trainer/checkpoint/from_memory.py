"""A run that starts again resumes from the newest step that the memory of its hosts holds, if the disk has none newer.

What was found is written to disk as an ordinary checkpoint, and loaded as one: into whatever layout this attempt has.

Invariants: every part is read and compared with its checksums before it counts; all ranks act on what all have found; a
checkpoint that the user has named is not overtaken; what cannot be completed, or not be written, is said and leaves the
run with its last checkpoint on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.run.copies_directory import copies_here
from hpcrl.run.role import RoleContext, say
from hpcrl.run.skipped_checkpoints import tell_passed_over
from hpcrl.trainer.checkpoint import save_load, whole
from hpcrl.trainer.checkpoint.copies_plan import CompleteStep, Part, newest_complete, share
from hpcrl.trainer.checkpoint.copy_files import copy_part, is_whole, part_directory, parts_here
from hpcrl.trainer.checkpoint.memory_copies import POSITION
from hpcrl.trainer.checkpoint.resume import WeightSource, restore
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.collectives import agree, broadcast_json, gather_json, is_alone
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.utils.untrusted_files import Damaged, read_json

NEVER = 1 << 40  #: more rollouts than any copy has
LARGEST = 1 << 30  #: bytes of a position


def restore_newest(
    context: RoleContext, policy: Policy, ranks: Ranks, checkpoints: Path
) -> tuple[Position, WeightSource]:
    """`restore`, from the newest step that disk or memory holds, and say what it was; collective."""
    run_id = context.plan.run_id
    if context.options.non_persistent_save_interval:
        hosts = [place.host for place in context.plan.trainers]
        bring_to_disk(ranks, copies_here(), hosts, checkpoints, run_id)
    tell = partial(tell_passed_over, context.rundir)
    at, said, source = restore(policy, ranks, context.options, checkpoints, run_id, tell)
    if ranks.rank == 0:
        say(said)
    return at, source


def bring_to_disk(
    ranks: Ranks, copies: Path | None, hosts: Sequence[str], checkpoints: Path, run_id: str
) -> int | None:
    """Write the newest complete copy as the last checkpoint, if it is newer than that; collective.

    Args:
        copies: the directory of this host.
        hosts: of each rank, in rank order.

    Returns:
        the rollouts of it, None if nothing was written.
    """
    after = broadcast_json(agree(lambda: _on_disk(checkpoints, run_id), ranks.rank == 0))
    places = [(host, place) for host, place in zip(hosts, gather_json(str(copies or "")), strict=True)]
    mine = [] if copies is None or after == NEVER else _whole_parts(copies, run_id, after, *share(places, ranks.rank))
    told = gather_json(mine)
    found = [msgspec.convert(parts, list[Part]) for parts in told]
    newest = newest_complete(found)
    if newest is None:
        if ranks.rank == 0 and any(found):
            say("note: no step is complete in the memory of the hosts: the last checkpoint on disk is taken")
        return None
    try:
        _write(newest, found, ranks, copies, checkpoints, run_id)
    except HpcrlError as error:
        if is_alone(error):
            raise
        if ranks.rank == 0:
            say(f"note: the step in memory cannot be used, the last checkpoint on disk is taken: {error}")
        return None
    return newest.step[0]


def _on_disk(checkpoints: Path, run_id: str) -> int:
    """The rollouts of the checkpoint that a resume would take; NEVER where nothing may take its place."""
    path, _ = whole.named(checkpoints, run_id)
    number = whole.number_of(path) if path is not None else 0
    if number is None or (path is not None and whole.chosen_by_user(checkpoints) == number):
        return NEVER
    return number


def _whole_parts(copies: Path, run_id: str, after: int, number: int, count: int) -> list[Part]:
    """Of the parts on this host those that are whole, of every `count`-th from `number` on."""
    here = list(parts_here(copies, run_id, after))
    return [part for directory, part in here[number::count] if is_whole(directory, part)]


def _write(
    newest: CompleteStep, found: list[list[Part]], ranks: Ranks, copies: Path | None, checkpoints: Path, run_id: str
) -> None:
    """Write it as a checkpoint; collective."""
    final = save_load.step(checkpoints, newest.step[0])
    staging = save_load.prepare(final, ranks)
    mine = newest.parts_from(ranks.rank, found[ranks.rank])

    def bring() -> None:
        for part in mine:
            assert copies is not None
            copy_part(part_directory(copies, part.rollout_id, part.rank), part, staging, without=(POSITION,))

    def position() -> Position:
        assert copies is not None
        path = part_directory(copies, newest.step[0], 0) / POSITION
        try:
            return read_json(path, Position, most=LARGEST)
        except (OSError, Damaged) as error:
            raise HpcrlError(f"{path} cannot be read: {error}") from error

    agree(bring)
    source = newest.holders[0]
    at = msgspec.convert(broadcast_json(agree(position, ranks.rank == source), source), Position)
    save_load.commit(staging, final, at, run_id, ranks)
    if ranks.rank == 0:
        say(f"the step after {at.rollout_id} rollouts was complete in the memory of the hosts: saved {final}")
