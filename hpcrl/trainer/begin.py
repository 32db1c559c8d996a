"""Where a run's weights come from, and from where it goes on.

    1. a checkpoint in --save that this run saved: everything goes on (--load that names the same directory: whoever saved it)
    2. --load: the weights of a checkpoint (hpcrl's, slime's or Megatron-LM's; --ckpt-step picks one) or of a Hugging Face model
    3. --ref-load: the same, where --load is not given or holds nothing yet
    4. --hf-checkpoint

Invariant: rank 0 looks, and all ranks do what it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrl.errors import HpcrlError
from hpcrl.options import Options
from hpcrl.trainer import checkpoint, torchdist
from hpcrl.trainer.agree import agree, broadcast_json
from hpcrl.trainer.checkpoint import Position
from hpcrl.trainer.megatron import Ranks
from hpcrl.trainer.model import Policy, load_hf


@dataclass(frozen=True)
class Source:
    """all: go on from a checkpoint; weights: take a checkpoint's weights; hf: those of a Hugging Face directory.

    anyones: another run may have saved it.
    """

    kind: Literal["all", "weights", "hf"]
    path: Path
    anyones: bool = False


def begin(policy: Policy, ranks: Ranks, options: Options, checkpoints: Path, run_id: str) -> tuple[Position, str]:
    """Fill the policy; collective.  Where the run is, and a line that says what was loaded.

    checkpoints: the directory of --save.  HpcrlError, the same on all ranks, if what the options name is not there, is
    damaged, or does not fit the model.
    """
    found = agree(lambda: find(options, checkpoints, run_id), ranks.rank == 0)
    sent = broadcast_json([found.kind, str(found.path), found.anyones] if found else None)
    source = Source(sent[0], Path(sent[1]), sent[2])
    if source.kind == "all":
        at = checkpoint.load(policy, ranks, source.path, None if source.anyones else run_id)
        return at, f"resumed from {source.path} at rollout {at.rollout_id}, policy version {at.version}"
    if source.kind == "weights":
        checkpoint.load_weights(policy, ranks, source.path)
    else:
        agree(lambda: load_hf(policy, source.path))
    return Position(), f"took the weights of {source.path}"


def find(options: Options, checkpoints: Path, run_id: str) -> Source:
    """What the options mean, by what is there now."""
    load = Path(options.load) if options.load else None
    same = load is not None and load.resolve() == checkpoints.resolve()
    if path := checkpoint.latest(checkpoints):
        ours = checkpoint.saved_by(path)
        if not same or ours == run_id:
            return Source("all", path)
        path = torchdist.find(checkpoints, options.ckpt_step, "--load")
        return Source("all", path, anyones=True) if checkpoint.saved_by(path) else Source("weights", path)
    if load and (found := _at(load, options.ckpt_step, "--load")):
        return found
    if options.ref_load:
        return _at(Path(options.ref_load), None, "--ref-load") or _nothing("--ref-load", options.ref_load)
    if load and not same:
        _nothing("--load", load)
    return Source("hf", Path(str(options.hf_checkpoint)))


def _at(directory: Path, ckpt_step: int | None, flag: str) -> Source | None:
    """The weights in `directory`, or None if it holds none (or is not there yet)."""
    if any((directory / name).is_file() for name in (checkpoint.TRACKER, ".metadata")) or ckpt_step is not None:
        return Source("weights", torchdist.find(directory, ckpt_step, flag))
    return Source("hf", directory) if (directory / "config.json").is_file() else None


def _nothing(flag: str, directory: object) -> Source:
    raise HpcrlError(
        f"{flag} {directory} holds no {checkpoint.TRACKER} and no config.json",
        "give a directory that a run saved to, or a Hugging Face model",
    )
