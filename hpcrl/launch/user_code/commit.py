"""Which commit of the user's own work is checked out.

Invariant: git is not started, as it would obey the settings of the repository; a commit is read from its files.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.utils.untrusted_files import read_given

_HASH = re.compile(r"[0-9a-f]{40,64}\Z")


def commit_of(folder: Path) -> str:
    """The commit that is checked out in the git repository around a directory; "" where there is none, or it cannot be
    told.  What has been changed since is not looked at."""
    try:
        top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
        return "" if top is None else _head(top / ".git")
    except (OSError, UnicodeDecodeError):
        return ""


def _head(git: Path) -> str:
    if git.is_file():  # a worktree of its own, or a submodule: gitdir: PATH
        git = git.parent / read_given(git).removeprefix("gitdir:").strip()
    head = read_given(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if _HASH.match(head) else ""
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    for root in (git, git / read_given(shared).strip()) if shared.is_file() else (git,):
        if (root / name).is_file():
            found = read_given(root / name).strip()
            return found if _HASH.match(found) else ""
        if (root / "packed-refs").is_file():
            for line in read_given(root / "packed-refs").splitlines():
                value, _, ref = line.partition(" ")
                if ref == name and _HASH.match(value):
                    return value
    return ""
