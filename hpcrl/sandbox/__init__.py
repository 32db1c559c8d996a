"""A place for programs that are not trusted: what they see, may call and may use is decided before they begin.

A box is such a place that stays: commands run in it one after another, and find the files and processes of those
before.  `async with sandbox() as box` (`pool.py`) hands one out that was made ahead; `run_confined` (`run.py`) runs one
command in a box of its own and hands back what it wrote.

    this process                    of each box, outside          inside
    `pool.py`, `box.py`    starts   `watcher.py`: limits, the end
                           ------>   starts unshare, bwrap or
                                     apptainer (`kinds.py`)  ----> `inside/main.py`, process 1, starts commands
            `box_line.py` <--------------------------------------- stream, `inside/frames.py`

| of the machine | a box has | by |
|---|---|---|
| files | system directories or an image, read-only or under memory; bounded memory to write to | `kinds.py` |
| home, /run, /sys, devices, sockets in files | none | the same: they are not in its root |
| networks, abstract sockets, System V IPC | none | namespaces of its own, `inside/seccomp.py` |
| other processes | none that it sees or can signal | a PID namespace |
| terminals | none | a session of its own, no /dev/tty, no ioctl that types |
| privileges | none, nor any that a program file could give | no capabilities, no new privileges |
| kernel interfaces for administrators and debuggers | none | `inside/seccomp.py` |
| time, memory, processes, files, output | bounded | limits of each process, `inside/commands.py`; `watcher.py` |

Invariant: standard library alone, and nothing imported from the rest of hpcrl but errors and a few files of utils
that import no more, so that it starts quickly and can be read as a whole (`nodes/`, `harbor/` and `slime_script.py`
import more).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrl.sandbox.box import Box
    from hpcrl.sandbox.limits import BoxLimits

#: names that can be imported from here, and the modules that they are in, which are imported when they are asked for
_PUBLIC = {
    "Box": "box",
    "BoxLimits": "limits",
    "BoxProcess": "box",
    "BoxResult": "box",
    "ListedFile": "box",
    "PoolCounts": "accounts",
    "SandboxLost": "box_line",
    "SandboxPool": "pool",
    "Unconfined": "box_line",
}


@contextlib.asynccontextmanager
async def sandbox(image: str = "system", limits: BoxLimits | None = None) -> AsyncIterator[Box]:
    """A box of this caller's alone, of the pool that this process has: `async with sandbox() as box`.

    It is ended, with all that runs and lies in it, when the block is left.

    Args:
        image: "system", the programs of this machine, or the absolute path of an unpacked root file system.
        limits: what the box may use; see `BoxLimits` for their defaults.

    Raises:
        UsageError: if the image is anything else.
        Unconfined: if this machine can make no box, and why.
        SandboxLost: if the box ends while it is used; whatever needed it is done again.
    """
    from hpcrl.sandbox.pool import default_pool

    async with default_pool().box(image, limits) as box:
        yield box


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"hpcrl.sandbox.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module hpcrl.sandbox has no attribute {name}")
