"""A place for programs that are not trusted: what they see, may call and may use is decided before they begin.

`run_confined` (`run.py`) runs a command there and hands back what it wrote; `confine` (`confine.py`) puts the calling
process itself there, for good.  Both take a `View` of files, and both refuse where the kernel lets this user make no
namespaces: nothing is run half confined.

A box is such a place that stays: commands run in it one after another, and find the files and processes of those
before.  `async with sandbox() as box` (`pool.py`) hands one out that was made ahead:

    this process                    one for all boxes       two of each box
    `pool.py`, `box.py`   control   `spawner.py`     fork   `keeper.py`, outside: limits, the end
                          ------->                  ---->     fork: `box_init.py`, process 1 inside, starts commands
            `box_line.py` <------------------------------------- stream, `frames.py`

| of the machine | a confined program has | by |
|---|---|---|
| files | system directories and those of its View, read-only; one bounded /tmp | a private root (`private_root.py`) |
| home, /run, /sys, devices, sockets in files | none | the same: they are not in that root |
| networks, abstract sockets, System V IPC | none | namespaces of its own |
| other processes | none that it sees or can signal | a PID namespace, or `seccomp.py` where it has none |
| terminals | none | a session of its own, no /dev/tty, no ioctl that types |
| privileges | none, nor any that a program file could give | no capabilities, no new privileges |
| kernel interfaces for administrators and debuggers | none | `seccomp.py` |
| time, memory, processes, files, output | bounded | limits, and `main.py`, which watches |

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
    "PoolCounts": "pool",
    "SandboxLost": "box_line",
    "SandboxPool": "pool",
    "Unconfined": "run",
}


@contextlib.asynccontextmanager
async def sandbox(image: str = "system", limits: BoxLimits | None = None) -> AsyncIterator[Box]:
    """A box of this caller's alone, of the pool that this process has: `async with sandbox() as box`.

    It is ended, with all that runs and lies in it, when the block is left.

    Args:
        image: "system", the programs of this machine, or the absolute path of an unpacked root file system.
        limits: what the box may use; see `BoxLimits` for their defaults.

    Raises:
        UsageError: if the image is none of these.
        Unconfined: if this machine can make no box, and why.
        SandboxLost: if the box ends while it is used; whatever needed it is done again.
    """
    from hpcrl.sandbox import accounts
    from hpcrl.sandbox.pool import default_pool

    pool = default_pool()
    accounts.keep(pool)
    async with pool.box(image, limits) as box:
        yield box


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"hpcrl.sandbox.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module hpcrl.sandbox has no attribute {name}")
