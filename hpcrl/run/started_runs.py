"""What a run was started with, and which runs this user has started.

    RUN/recipe.json, RUN/recipe.toml      what the run was started with, to resume with the same; the recipe's text
    ~/.local/state/hpcrl/runs/NAME-HASH   a symbolic link for each run, for `hpcrl status` ($XDG_STATE_HOME)

Invariants: recipe.json is written when the run directory is made, and again where a resume changes the layout; a
directory with this file is a run directory.  The links are a convenience, never a need: `remember` fails no run, and
what has been removed since is not listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import UsageError
from hpcrl.run.rundir import read_record, write_atomic
from hpcrl.utils.untrusted_files import as_given

#: the names in a run directory
RECIPE = "recipe.json"
COPY = "recipe.toml"
LIVE = "live-code"  #: there where custom functions are not imported from copies (code_files.py)


class RecipeFile(msgspec.Struct, frozen=True):
    """What it holds.

    Attributes:
        path: where the recipe was.
        overrides: what the flags set, by option, or by STAGE.option where it counts in that stage alone.
        identity: of this run alone.
        commit: that is checked out around the recipe, "" for none.
        files: FILE.py:FUNCTION, as recipe or flags have it -> (dotted path, its directory).
    """

    identity: str
    path: str
    overrides: dict[str, Any] = {}
    commit: str = ""
    files: dict[str, tuple[str, str]] = {}


def is_run(root: Path) -> bool:
    """Whether `root` is a run directory.

    Raises:
        OSError: if it may not be looked into.
    """
    return (root / RECIPE).is_file()


def write_recipe_file(root: Path, begun: RecipeFile, text: str | None = None) -> None:
    """Write it, with a copy of the recipe next to it: `text`, or the file at `begun.path`."""
    if text is None:
        shutil.copyfile(begun.path, root / COPY)
    else:
        write_atomic(root / COPY, text.encode())
    write_atomic(root / RECIPE, msgspec.json.encode(begun))


def read_recipe_file(root: Path) -> RecipeFile:
    """What the run in `root` was begun with.

    Raises:
        UsageError: if there is no run, or the file is damaged.
    """
    if (found := read_record(root / RECIPE, RecipeFile, "start the recipe again", UsageError)) is None:
        raise UsageError(
            f"{root} is not a run directory: it has no {RECIPE}", "name the directory that hpcrl run printed"
        )
    return found


# ---- the runs of this user

FORGET = 90 * 86400.0  #: seconds after which a link goes whose file system is not there


def links_folder() -> Path:
    """The directory of the links."""
    base = os.environ.get("XDG_STATE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return home / "hpcrl" / "runs"


def remember(root: Path) -> None:
    """Note a run directory; never fails."""
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, or none that can be written: then not
        root = as_given(root)
        links = links_folder()
        links.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"{root.name}-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:10]}"
        beside = links / f".{name}.{os.getpid()}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(root)
        beside.replace(links / name)


def known_runs() -> list[Path]:
    """The runs that are still there, sorted; links to others are dropped."""
    found = []
    try:
        links = [p for p in links_folder().iterdir() if not p.name.startswith(".")]
    except (OSError, RuntimeError):
        return []
    for link in links:
        with contextlib.suppress(OSError):  # such as a directory that is not ours to look into
            root = Path(os.readlink(link))
            if is_run(root):
                found.append(root)
            elif root.parent.is_dir() or time.time() - link.lstat().st_mtime > FORGET:
                link.unlink()  # a scratch file system that is not mounted here may come back: those are kept a while
    return sorted(found)
