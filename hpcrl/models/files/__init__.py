"""Directories of weights as files: Hugging Face models and Megatron's torch_dist checkpoints; nothing here needs a
GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from hpcrl.run.rundir import TRACKER
from hpcrl.utils.untrusted_files import Damaged, read_json


class _Saving(msgspec.Struct):
    """What is read of a run's options.json."""

    save: str | None = None


def checkpoints_of(directory: Path) -> Path:
    """Where the run in a directory saves, with stages the one that saved last; of any other the directory itself."""
    alone = directory / "options.json"
    places: list[Path] = []
    for file in [alone] if alone.is_file() else directory.glob("*/options.json"):
        with contextlib.suppress(OSError, Damaged):
            places.append(Path(read_json(file, _Saving).save or file.parent / "checkpoints"))
    saved = [place for place in places if (place / TRACKER).is_file()]
    return max(saved, key=lambda place: (place / TRACKER).stat().st_mtime, default=directory)


def holds_weights(directory: Path) -> bool:
    """Whether a directory is a run, one that a run saved to, a checkpoint, or a Hugging Face model, as far as names of
    files tell."""
    directory = checkpoints_of(directory)
    named = any((directory / name).is_file() for name in (TRACKER, ".metadata", "config.json"))
    return named or next(directory.glob("iter_*"), None) is not None
