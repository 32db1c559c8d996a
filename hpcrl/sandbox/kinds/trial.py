"""Which kinds of boxes this machine can make, of those that are not ours: each is tried.

Invariant: a kind that is said to work has run a command here, a moment ago.
"""

from __future__ import annotations

import asyncio

from hpcrl.errors import HpcrlError
from hpcrl.sandbox.kinds.choose import FOLDER
from hpcrl.sandbox.pool import SandboxPool


def kind_refusals() -> dict[str, str]:
    """Each kind but "namespaces", and why this machine can make no box of it; "": it can."""
    return {name: error.what if (error := refusal_of(name)) else "" for name in FOLDER.names()}


def refusal_of(name: str) -> HpcrlError | None:
    """Why this machine can make no box of a kind; None: it can."""

    async def work() -> None:
        async with SandboxPool(warm=0, kind=name) as pool, pool.box() as box:
            await box.run(["/bin/sh", "-c", ":"])

    try:
        asyncio.run(work())
    except HpcrlError as error:
        return error
    return None
