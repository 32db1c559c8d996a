"""RUN/recipe.json: what a run was begun with, so that it can go on with the same; RUN/recipe.toml is the recipe's own
text.

Invariant: written once, when the run directory is made; a directory with this file is a run directory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import UsageError
from hpcrl.run.rundir import write_atomic

#: the names in a run directory
RECIPE = "recipe.json"
COPY = "recipe.toml"


class RecipeFile(msgspec.Struct, frozen=True):
    """What it holds.  path: where the recipe was; overrides: what the flags set, by option, or by STAGE.option where
    it counts in that stage alone; identity: of this run alone."""

    identity: str
    path: str
    overrides: dict[str, Any] = {}


def is_run(root: Path) -> bool:
    """Whether `root` is a run directory.  OSError if it may not be looked into."""
    return (root / RECIPE).is_file()


def write_recipe_file(root: Path, begun: RecipeFile, text: str | None = None) -> None:
    """Write it, with a copy of the recipe beside it: `text`, or the file at `begun.path`."""
    if text is None:
        shutil.copyfile(begun.path, root / COPY)
    else:
        write_atomic(root / COPY, text.encode())
    write_atomic(root / RECIPE, msgspec.json.encode(begun))


def read_recipe_file(root: Path) -> RecipeFile:
    """What the run in `root` was begun with.  UsageError if there is no run, or the file is damaged."""
    if not is_run(root):
        raise UsageError(
            f"--resume {root}: no run directory (it has no {RECIPE})", "name the directory that hpcrl run printed"
        )
    try:
        return read_json(root / RECIPE, RecipeFile)
    except (OSError, Damaged) as error:
        raise UsageError(f"{root / RECIPE} is damaged: {error}", "start the recipe anew") from error
