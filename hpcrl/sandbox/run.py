"""`run_confined`: a command that is not trusted, run in a box of its own, and what it wrote.

Invariant: the command gets none of the caller's files, no terminal, and no variable that is not handed over; it has
ended, with all that it started, when the call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.sandbox.box import Box
from hpcrl.sandbox.box_line import SandboxLost
from hpcrl.sandbox.inside.files import WORK
from hpcrl.sandbox.kinds import PROGRAMS, Shown
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.pool import SandboxPool

OUTPUT = 16 << 20  #: bytes that are kept of each of a command's outputs
RESULTS = f"{WORK}/results"  #: where a command writes what comes back
MOST = 64 << 20  #: bytes of results
LIMITS = BoxLimits(memory=1536 << 20, processes=128, cpu=20, disk=64 << 20, output=OUTPUT)


class Confined(NamedTuple):
    """What became of a command.

    Attributes:
        code: its exit status, negative for a signal.
        out, err: what it wrote; control characters are still in it.
        late: it had not ended in time.
        limit: the text of the other limit that ended it, or "".
    """

    code: int
    out: str
    err: str
    late: bool = False
    limit: str = ""


def run_confined(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    shown: Shown = (),
    directory: str = "/",
    results: str = "",
) -> Confined:
    """Run a command.

    For whatever reads text or code of unknown origin: an imported script, a tool that a model has written.  The
    command begins in `directory`, with standard input empty.  It can start other programs that it sees.

    Args:
        command: its first word is a path inside.
        environment: its variables, besides those of every box.
        seconds: it is ended after these.
        shown: what it sees besides the system's directories.
        results: an empty directory outside that gets the regular files of RESULTS.

    Raises:
        Unconfined: says why this machine cannot confine it; nothing was run.
    """

    async def work() -> Confined:
        async with SandboxPool(warm=0, limits=LIMITS) as pool, pool.box(shown=shown) as box:
            await box.run(["mkdir", RESULTS])
            done = await box.run(command, seconds, env=environment, cwd=directory)
            if results:
                with contextlib.suppress(OSError):  # it has put them away, or too many there
                    await _fetch(box, Path(results))
            return Confined(done.code, done.stdout, done.stderr, done.timed_out, done.limit)

    try:
        return asyncio.run(work())
    except SandboxLost as error:
        return Confined(-9, "", "", limit=f"lost its sandbox ({error.what})")


async def _fetch(box: Box, results: Path) -> None:
    """Copy what was written, MOST bytes of regular files."""
    left = MOST
    for one in await box.listing(RESULTS):
        if one.kind == "file" and one.size <= left:
            data = await box.read(f"{RESULTS}/{one.name}", left)
            left -= len(data)
            (results / one.name).write_bytes(data)


def kind_refusals() -> dict[str, str]:
    """Each kind, and why this machine can make no box of it; "": it can."""
    return {name: error.what.partition(": ")[2] if (error := refusal_of(name)) else "" for name in PROGRAMS}


def refusal_of(kind: str | None) -> HpcrlError | None:
    """Why this machine can make no box of a kind; None: it can, for one has run a command a moment ago."""

    async def work() -> None:
        async with SandboxPool(warm=0, kind=kind) as pool, pool.box() as box:
            await box.run(["/bin/sh", "-c", ":"])

    try:
        asyncio.run(work())
    except HpcrlError as error:
        return error
    return None
