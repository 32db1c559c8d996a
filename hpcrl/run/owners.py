"""Refuses a run directory that is another user's, or that another user could exchange for one of his own.

A run's recipe names commands and functions, and they run as the user that starts or resumes it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.utils.untrusted_files import user_name

#: users that own directories of the system: below it no person has an account, and the last is what a container and NFS
#: show in place of users that they do not know
SYSTEM_USERS, UNKNOWN_USER = 1000, 65534
#: of a run: what says which code runs
_OBEYED = ("recipe.json", "recipe.toml", "options.json", "job.json", "code")


def of_another_user(path: Path) -> str:
    """The user that a file or directory belongs to, "" if it is ours or not to be seen; a link is not followed."""
    uid = path.lstat().st_uid
    return "" if uid in (os.geteuid(), UNKNOWN_USER) else user_name(uid)


def refuse_foreign(root: Path) -> None:
    """Raise UsageError for a run directory, or a recipe in it, that is another user's."""
    for path in (root, *(root / name for name in _OBEYED)):
        if os.path.lexists(path) and (owner := of_another_user(path)):
            raise UsageError(
                f"{path} belongs to user {owner}, and its recipe would run commands as you",
                "have that user do it, or start a copy of its recipe.toml, if you trust it; --load names a checkpoint",
            )


def refuse_replaceable(path: Path) -> None:
    """Raise UsageError where all may write to a directory or to one above it, or another person has one above it.

    The owner of a directory can rename what is in it, whatever its mode.  A project's directory is accepted, which is
    another person's and belongs to a group of ours.
    """
    given = path.absolute()
    for place in (*reversed((given, *given.parents)), *reversed(given.resolve().parents)):
        if not place.exists():
            continue
        found = place.stat()
        foreign = found.st_uid not in (0, os.geteuid(), UNKNOWN_USER)
        sticky = found.st_mode & stat.S_ISVTX and place != given
        if found.st_mode & stat.S_IWOTH and (foreign or not sticky):
            raise UsageError(f"another user may replace {path}: {place} is writable by all", f"chmod o-w {place}")
        if foreign and found.st_uid >= SYSTEM_USERS and found.st_gid not in (os.getegid(), *os.getgroups()):
            why = f"{place} belongs to user {user_name(found.st_uid)}, and to no group of yours"
            raise UsageError(f"another user may replace {path}: {why}", "choose another directory")
