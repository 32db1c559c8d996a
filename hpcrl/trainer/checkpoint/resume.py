"""Where the weights of a run come from, and where it resumes.

    1. a checkpoint in --save that this run saved: model, optimizer, schedules, random states, and the fields of
       `save_load.Position`: rollout, policy version, position in the data (where --load names the same directory,
       whichever run saved it); the newest that is whole, if the tracker's is damaged or the tracker is lost (whole.py)
    2. --load: the weights of a run, of a checkpoint (hpcrl's, slime's or Megatron-LM's; --ckpt-step picks one) or of a
       Hugging Face model
    3. --ref-load: the same, where --load is not given or holds nothing yet
    4. --hf-checkpoint

Invariants: rank 0 looks, and all ranks act on what it found; where another checkpoint is taken than the tracker names,
that is said, and the tracker names it from then on, as after `hpcrl resume --ckpt-step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.files import checkpoints_of, torch_dist
from hpcrl.models.files.config_json import check_same_vocabulary
from hpcrl.models.files.fp8 import scheme_of
from hpcrl.run.rundir import TRACKER, write_atomic
from hpcrl.trainer.checkpoint import save_load, whole
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.collectives import agree, broadcast_json
from hpcrl.trainer.lora.saved import base_digest
from hpcrl.trainer.lora.values import begin_adapter
from hpcrl.trainer.megatron.hf_weights import load_hf
from hpcrl.trainer.megatron.model import NoOptimizer, Policy
from hpcrl.trainer.parallel_state import Ranks

TEACHER = "--opd-teacher-load"


@dataclass(frozen=True)
class WeightSource:
    """all: resume from a checkpoint; weights: take a checkpoint's weights; hf: those of a Hugging Face directory.

    Attributes:
        foreign: another run may have saved it.
        named: the user has given its number: no other is taken for it.
        lost: what is wrong with the tracker, which does not name it.
    """

    kind: Literal["all", "weights", "hf"]
    path: Path
    foreign: bool = False
    named: bool = False
    lost: str = ""

    def same_weights(self, other: WeightSource | None) -> bool:
        """Whether both are the weights of the same files."""
        return other is not None and (self.kind, os.path.normpath(self.path)) == (
            other.kind,
            os.path.normpath(other.path),
        )


def restore(
    policy: Policy,
    ranks: Ranks,
    options: Options,
    checkpoints: Path,
    run_id: str,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Position, str, WeightSource]:
    """Fill the policy; collective. Where the run is, a line that says what was loaded, and what that was.

    Args:
        checkpoints: the directory of --save.
        tell: called on rank 0 if another checkpoint is taken than the tracker names, with what is to be said.

    Raises:
        HpcrlError: the same on all ranks, if what the options name is not there, is damaged, or does not fit the model.
    """
    source = _agreed(agree(lambda: find_source(options, checkpoints, run_id), ranks.rank == 0))
    took = source
    if policy.lora is not None:
        if source.kind == "weights" and source.path.is_relative_to(checkpoints):
            raise UsageError(
                f"--save {checkpoints} holds the weights of another trainer, but this run saves only adapters",
                "name another --save; --load trains over those weights",
            )
        took = _agreed(agree(lambda: _given(options, checkpoints, own=False), ranks.rank == 0))
        load_weights(policy, ranks, took)
        policy.base.digest = base_digest(policy)
        policy.base.path = str(took.path)
    if source.kind == "all":
        path, record = _whole(source, ranks, None if source.foreign else run_id, tell, options.verify_checkpoint)
        try:
            save_load.load_state(policy, ranks, path)
        except HpcrlError as error:
            raise type(error)(error.what, whole.instead(path) or error.hint) from error
        said = f"resumed from {path} at rollout {record.rollout_id}, policy version {record.version}"
        return Position(record.rollout_id, record.version, record.data), said, took
    if policy.lora is not None:
        return Position(), f"took the weights of {took.path}, and {begin_adapter(policy, options)}", took
    load_weights(policy, ranks, source)
    return Position(), f"took the weights of {source.path}", source


def _whole(
    source: WeightSource, ranks: Ranks, run_id: str | None, tell: Callable[[str], object], verify: bool
) -> tuple[Path, whole.CheckpointRecord]:
    """The checkpoint to resume from, which the tracker names from then on; collective."""
    before: Callable[[], Sequence[Path]] = tuple if source.named else partial(whole.older, source.path, run_id)
    choice = whole.newest_whole(source.path, before, ranks, run_id, verify)
    if wrong := [*filter(None, [source.lost]), *choice.passed]:

        def settle() -> None:
            tell(f"{'; '.join(wrong)}: resumes from {choice.path}, the newest checkpoint that is whole")
            write_atomic(choice.path.parent / TRACKER, str(choice.record.rollout_id).encode(), mode=0o644)

        agree(settle, ranks.rank == 0)
    return choice.path, choice.record


def find_reference(options: Options, ranks: Ranks) -> WeightSource:
    """The weights that --ref-load names; collective.

    Raises:
        HpcrlError: as `restore`.
    """
    return _agreed(agree(lambda: _reference(options), ranks.rank == 0))


def find_teacher(options: Options, ranks: Ranks) -> WeightSource:
    """The same with --opd-teacher-load.  DataError too if the teacher's tokens are not the student's."""

    def look() -> WeightSource:
        directory = Path(str(options.opd_teacher_load))
        found = _at(directory, options.opd_teacher_ckpt_step, TEACHER) or _nothing(TEACHER, directory)
        if found.kind == "hf":
            check_same_vocabulary(directory, TEACHER, Path(str(options.hf_checkpoint)))
        return found

    return _agreed(agree(look, ranks.rank == 0))


def fill_modules(policy: Policy, ranks: Ranks, source: WeightSource) -> None:
    """Fill the modules, and neither the optimizer nor layers that predict further tokens, of which log-probs take
    nothing; collective."""
    load_weights(replace(policy, optimizer=cast(Any, NoOptimizer())), ranks, source, heads=False)


def find_weights(directory: str, flag: str, ranks: Ranks) -> WeightSource:
    """The weights in a directory that `flag` names; collective.

    Raises:
        HpcrlError: if there are none.
    """
    return _agreed(agree(lambda: _at(Path(directory), None, flag) or _nothing(flag, directory), ranks.rank == 0))


def load_weights(policy: Policy, ranks: Ranks, source: WeightSource, heads: bool = True) -> None:
    """The weights of a torch_dist checkpoint or a Hugging Face directory into the policy; collective.

    Args:
        heads: see `load_weights`.
    """
    if source.kind == "weights":
        save_load.load_weights(policy, ranks, source.path, heads)
    else:
        scheme = scheme_of(source.path) if policy.lora is not None else None
        agree(lambda: load_hf(policy if heads else replace(policy, heads=0), source.path, scheme=scheme))


def _agreed(found: WeightSource | None) -> WeightSource:
    """What rank 0 found, on every rank."""
    told = broadcast_json([found.kind, str(found.path), found.foreign, found.named, found.lost] if found else None)
    kind, path, foreign, named, lost = told
    return WeightSource(kind, Path(path), foreign, named, lost)


def find_source(options: Options, checkpoints: Path, run_id: str) -> WeightSource:
    """What the options mean, by what is there now."""
    load = Path(options.load) if options.load else None
    same = load is not None and load.resolve() == checkpoints.resolve()
    path, lost = whole.named(checkpoints, run_id)
    if path is not None:
        if not same or whole.of_this_run(path, run_id):
            named = whole.chosen_by_user(checkpoints) == whole.number_of(path)
            return WeightSource("all", path, named=named, lost=lost)
        path = torch_dist.find_checkpoint(checkpoints, options.ckpt_step, "--load")
        if save_load.saved_by(path):
            return WeightSource("all", path, foreign=True, named=options.ckpt_step is not None)
        return WeightSource("weights", path)
    return _given(options, checkpoints)


def _given(options: Options, checkpoints: Path, own: bool = True) -> WeightSource:
    """The weights of --load, --ref-load or --hf-checkpoint, the first that there are.

    Args:
        own: --load may be the directory of --save, which in a run with adapters holds no weights.
    """
    load = Path(options.load) if options.load else None
    same = load is not None and load.resolve() == checkpoints.resolve()
    if load and (own or not same) and (found := _at(load, options.ckpt_step, "--load")):
        return found
    if options.ref_load:
        return _reference(options)
    if load and not same:
        _nothing("--load", load)
    return WeightSource("hf", Path(str(options.hf_checkpoint)))


def _reference(options: Options) -> WeightSource:
    """What --ref-load and --ref-ckpt-step name."""
    directory = str(options.ref_load)
    return _at(Path(directory), options.ref_ckpt_step, "--ref-load") or _nothing("--ref-load", directory)


def _at(directory: Path, ckpt_step: int | None, flag: str) -> WeightSource | None:
    """The weights in `directory`, or in the run there; None if it holds none (or is not there yet)."""
    directory = checkpoints_of(directory)
    if any((directory / name).is_file() for name in (TRACKER, ".metadata")) or ckpt_step is not None:
        return WeightSource("weights", torch_dist.find_checkpoint(directory, ckpt_step, flag))
    return WeightSource("hf", directory) if (directory / "config.json").is_file() else None


def _nothing(flag: str, directory: object) -> WeightSource:
    raise HpcrlError(
        f"{flag} {directory} holds no {TRACKER} and no config.json",
        "give a directory that a run saved to, or a Hugging Face model",
    )
