"""Which runs this user has started: one symbolic link for each, under $XDG_STATE_HOME/hpcrl/runs (~/.local/state).

Invariant: a convenience, never a need: `remember` fails no run, and what has been removed since is not listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from hpcrl.careful_files import as_given
from hpcrl.run.recipe_file import is_run

FORGET = 90 * 86400.0  #: seconds after which a link goes whose file system is not there


def place() -> Path:
    """The directory of the links."""
    base = os.environ.get("XDG_STATE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return home / "hpcrl" / "runs"


def remember(root: Path) -> None:
    """Note a run directory; never fails."""
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, or none that can be written: then not
        root = as_given(root)
        links = place()
        links.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"{root.name}-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:10]}"
        beside = links / f".{name}.{os.getpid()}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(root)
        beside.replace(links / name)


def known() -> list[Path]:
    """The runs that are still there, sorted; links to others are dropped."""
    found = []
    try:
        links = [p for p in place().iterdir() if not p.name.startswith(".")]
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
