"""Directories of weights as files: Hugging Face models and Megatron's torch_dist checkpoints; nothing here needs a
GPU."""

from __future__ import annotations

from pathlib import Path

from hpcrl.run.rundir import TRACKER


def holds_weights(directory: Path) -> bool:
    """Whether a directory is one that a run saved to, a checkpoint, or a Hugging Face model, as far as names of files
    tell."""
    named = any((directory / name).is_file() for name in (TRACKER, ".metadata", "config.json"))
    return named or next(directory.glob("iter_*"), None) is not None
