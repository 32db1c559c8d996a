"""What a container of another program has inside, besides an image: the Python of the first process, or the machine's
own directories.

Invariant: of the machine there is what a box of ours sees of it, and no more.
"""

from __future__ import annotations

import os

from hpcrl.sandbox.private_root import SETTINGS, SYSTEM

INSIDE = "/.hpcrl"  #: where the directory of `runtime.py` is
#: names in an image's root, in whose place a box has something of its own
OWN = ("dev", "home", "proc", "root", "run", "sys", "tmp", "work", INSIDE[1:])
#: of the first process: with these it reads no locale, converter or time zone of the image's
VARIABLES = {"LC_ALL": "C", "TZ": "UTC0"}
FIRST = "hpcrl.sandbox.kinds.first_process"


def first_process_words(talk: int, keeper: int, told: str) -> list[str]:
    """The command line of a box's first process, inside."""
    libraries = f"{INSIDE}/so"
    python = [f"{libraries}/ld.so", "--inhibit-cache", "--library-path", libraries]
    python += [f"{INSIDE}/bin/python3", "-I", "-S", "-B"]
    return [*python, "-m", FIRST, str(talk), str(keeper), told]


def settings() -> list[str]:
    """Names of /etc that a box of "system" sees, as far as they are there."""
    return [name for name in SETTINGS if os.path.exists(f"/etc/{name}")]


def system_binds() -> list[tuple[str, str]]:
    """(path outside, path inside) of what a box of "system" sees of the machine."""
    found = [(folder, folder) for folder in SYSTEM if os.path.isdir(folder) and not os.path.islink(folder)]
    return found + [(os.path.realpath(f"/etc/{name}"), f"/etc/{name}") for name in settings()]
