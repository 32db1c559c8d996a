"""The directory of one shape's compiled code on a node: its lock, what is known of it, and when it goes.

    ROOT/SHAPE/
      vllm/ triton/ ...         compiled code
      .lock                     held by the process that unpacks there
      .in-use                   held, shared, by every role that uses it
      .unpacked.json            what was unpacked or packed last

Invariant: a directory goes only if no role uses it; on a file system without locks none goes, and nothing is waited
for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from hpcrl.errors import DeadlineError
from hpcrl.run.compile_cache.archive import FOLDERS, CompiledFile
from hpcrl.run.role import say
from hpcrl.run.rundir import write_atomic
from hpcrl.run.scratch import is_own_directory
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.locks import try_lock
from hpcrl.utils.untrusted_files import Damaged, open_append, open_regular, read_json

LOCK = ".lock"
IN_USE = ".in-use"
KNOWN = ".unpacked.json"
UNUSED = 14 * 86400.0  #: seconds after which a directory that no role has used goes
SHAPE = re.compile(r"[a-z]+-[0-9a-f]{24}")


class Unpacked(msgspec.Struct, frozen=True):
    """What a directory has from an archive, and from which."""

    identity: str = ""
    files: dict[str, CompiledFile] = {}


def known(here: Path) -> Unpacked:
    """What was unpacked or packed there last."""
    try:
        return read_json(here / KNOWN, Unpacked)
    except (OSError, Damaged):
        return Unpacked()


def note_known(here: Path, found: Unpacked) -> None:
    """Note that for the next role of this node."""
    write_atomic(here / KNOWN, msgspec.json.encode(found))


@contextlib.contextmanager
def locked(here: Path, deadline: Deadline) -> Iterator[None]:
    """While no other process of the node unpacks there; on a file system without locks, at once.

    Raises:
        DeadlineError, OSError.
    """
    with open_append(here / LOCK) as file:

        def without(why: str) -> None:
            say(f"note: compile cache: {here} cannot be locked ({why})")

        if not poll(lambda: try_lock(file, without), deadline, 0.1):
            raise DeadlineError(f"another process has unpacked for {deadline.seconds:.0f} s")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # now: a process that was forked meanwhile has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)


def use(here: Path) -> BinaryIO:
    """Note that a role uses a directory, for as long as the file is open. OSError."""
    file = open_append(here / IN_USE)
    with contextlib.suppress(OSError):
        os.utime(here)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def remove_unused(root: Path) -> None:
    """Remove the directories of shapes that no role has used for UNUSED."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if SHAPE.fullmatch(path.name) and is_own_directory(path):
                with contextlib.suppress(OSError):
                    _remove_if_unused(path)


def _remove_if_unused(path: Path) -> None:
    """Remove it, unless it is of use. OSError: if it is, or cannot be told."""
    if time.time() - path.stat().st_mtime < UNUSED:
        return
    with open_regular(path / IN_USE) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


def clear(here: Path) -> None:
    """Remove what is compiled there; the locks stay."""
    (here / KNOWN).unlink(missing_ok=True)
    for folder in FOLDERS:
        shutil.rmtree(here / folder, ignore_errors=True)
