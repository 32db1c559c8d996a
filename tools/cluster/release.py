"""`python -m tools.cluster.release ROOT COMMAND ...`: COMMAND where the system's programs are those of ROOT.

The first thing that process 1 of a node runs when the cluster is of another release than the machine: ROOT's /usr,
/etc and /var/lib take the place of the machine's, in this mount namespace alone.  All else stays: the checkout, the
shared file system, /usr/local, the accounts, and the interpreter that runs this (roots.py has made the places where it
is mounted).

Invariant: COMMAND is a new program, so nothing of it has an older library loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.cluster.mounts import bind
from tools.cluster.roots import KEPT, interpreter

REPLACED = ("/usr", "/etc", "/var/lib")


def enter(root: Path) -> None:
    """Put the directories of `root` in the places of the machine's, for this mount namespace.

    OSError naming the directory if the kernel refuses.
    """
    kept = [(path, os.open(path, os.O_PATH)) for path in (*KEPT, *interpreter()) if path.exists()]
    for directory in REPLACED:
        bind(root / directory[1:], directory)
    for path, handle in kept:
        bind(f"/proc/self/fd/{handle}", path)
        os.close(handle)


if __name__ == "__main__":
    enter(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
