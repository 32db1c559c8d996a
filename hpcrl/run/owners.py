"""Whose a run directory is, and who could put another in its place.

A run's recipe names commands and functions, and they run as the user that starts or resumes it: its directory must be
that user's own, and stay the one that it is.  Reading another user's finished run needs none of this.

Invariant: nothing is made in a directory that is refused, and nothing of a directory that is refused runs.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.untrusted_files import user_name

#: users that own directories of the system: below it no person has an account, and the last is what a container and NFS
#: show in place of users that they do not know
SYSTEM_USERS, UNKNOWN_USER = 1000, 65534
#: of a run: what says which code runs
_OBEYED = ("recipe.json", "recipe.toml", "options.json", "job.json", "code")
TRUSTED_OWNERS = "HPCRL_TRUSTED_OWNERS"  #: names of users, with commas, that may own directories above a run's


def swappable(path: Path) -> tuple[Path, str] | None:
    """(directory, why) of the first from above in which a user that nothing vouches for may rename what leads to
    `path`, and put something else there; or None.  Parents that are not there yet are left out.

    The owner of a directory may do so whatever its mode, the sticky bit included.  Our own directories and root's are
    ours to trust.  So is another user's that belongs to a group of ours and that not everybody can write to: project
    directories are made like that, owned by the user that leads the group, and refusing them would keep most users of
    most clusters from working; `owned_by_another` says who it is.  Accounts below SYSTEM_USERS own file systems.  Any
    other owner has to be named in TRUSTED_OWNERS.
    """
    for parent in reversed(path.parents):
        try:
            found = parent.stat()
        except FileNotFoundError:
            continue
        foreign = _foreign(found)
        if found.st_mode & stat.S_IWOTH and (foreign or not found.st_mode & stat.S_ISVTX):
            owner = f" and belongs to user {user_name(found.st_uid)}" if foreign else ""
            return parent, f"{parent} is writable by all{owner}"
        if foreign and found.st_uid >= SYSTEM_USERS and found.st_gid not in (os.getegid(), *os.getgroups()):
            return parent, f"{parent} belongs to user {user_name(found.st_uid)}, and to no group of yours"
    return None


def owned_by_another(path: Path) -> tuple[Path, str] | None:
    """(directory, its owner) of the first from above that is another user's, who may do the same; or None."""
    for parent in reversed(path.parents):
        if _foreign(found := parent.stat()) and found.st_uid >= SYSTEM_USERS:
            return parent, user_name(found.st_uid)
    return None


def _foreign(found: os.stat_result) -> bool:
    """Whether a file's owner is neither us nor the system, nor named as trusted."""
    return found.st_uid not in (0, os.geteuid(), UNKNOWN_USER) and not _trusted(found.st_uid)


def _trusted(uid: int) -> bool:
    """Whether TRUSTED_OWNERS has this user's name or number."""
    trusted = os.environ.get(TRUSTED_OWNERS, "").replace(" ", "").split(",")
    return bool({user_name(uid), str(uid)} & set(trusted))


def of_another_user(path: Path) -> str:
    """The user that a file or directory belongs to, "" if it is ours, a trusted user's or not to be seen; a link is not
    followed."""
    uid = path.lstat().st_uid
    return "" if uid in (os.geteuid(), UNKNOWN_USER) or _trusted(uid) else user_name(uid)


def swappable_by_group(path: Path) -> tuple[Path, str] | None:
    """(directory, group) of the first from above in which a group of several may do the same; or None."""
    for parent in reversed(path.parents):
        found = parent.stat()
        if found.st_mode & stat.S_IWGRP and not found.st_mode & stat.S_ISVTX and (name := _shared_group(found.st_gid)):
            return parent, name
    return None


def _shared_group(number: int) -> str:
    """The name of a group, or its number; "" for root's and for one that has this user alone in it."""
    if number == 0:
        return ""
    try:
        group, mine = grp.getgrgid(number), pwd.getpwuid(os.getuid())
    except KeyError:
        return str(number)
    alone = set(group.gr_mem) <= {mine.pw_name} and group.gr_name == mine.pw_name
    return "" if alone else group.gr_name


def refuse_replaceable(path: Path, shown: str) -> None:
    """Raise UsageError for a directory that another user could replace.

    Args:
        shown: what the error calls it.
    """
    if found := swappable(path) or swappable(path.resolve()):
        parent, why = found
        ours = parent.stat().st_uid in (0, os.geteuid())
        fix = f"chmod o-w {parent}" if ours else f"trust the owner with {TRUSTED_OWNERS}=NAME"
        raise UsageError(f"{shown}: another user may replace it: {why}", f"choose another directory, or {fix}")


def refuse_link_to_nothing(path: Path) -> None:
    """Raise UsageError for a link that leads nowhere: a directory would be made where its owner likes."""
    if path.is_symlink() and not path.exists():
        raise UsageError(
            f"--run-dir {path} is a link to {path.resolve()}, which is not there",
            "did you make it? name the directory",
        )


def refuse_foreign(root: Path) -> None:
    """Raise UsageError for a run directory, or a recipe in it, that is another user's."""
    for name in ("", *_OBEYED):
        path = root / name
        if os.path.lexists(path) and (owner := of_another_user(path)):
            raise UsageError(
                f"{path} belongs to user {owner}, and what its recipe names would run as you",
                "have that user do it, or start a copy of its recipe.toml, if you trust it; --load names a checkpoint. "
                f"Are you that user, in a container or on a volume that shows one owner? {TRUSTED_OWNERS}={owner}",
            )


def refuse_of_another(root: Path) -> None:
    """Raise UsageError for a run directory whose recipe another user has written, or could exchange."""
    refuse_foreign(root)
    if root.stat().st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{root} is writable by all, and what it holds would run as you",
            f"chmod go-w {root}, once you have looked at it",
        )
    refuse_replaceable(root if root.is_absolute() else Path.cwd() / root, str(root))
