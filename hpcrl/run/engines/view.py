"""attempts/N/engines.json: how each engine is, as the rollout process knows it, for whoever looks from outside.

Invariant: written whole, at each change and every few seconds, so that an old file means that its writer is gone.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import RunDir, write_atomic

VIEW = "engines.json"  #: its name in attempts/N


class EngineView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.  state: as in `rollout/engines/registry.py`; version: of its weights; requests: in flight; restarts:
    of its process; why: what is wrong with it, or was last."""

    index: int
    host: str
    state: str
    version: int | None
    requests: int
    restarts: int
    why: str = ""


class EngineViews(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All engines of an attempt.  time: unix time; published: the version that all are to hold."""

    time: float
    published: int | None
    engines: list[EngineView]


def write_views(rundir: RunDir, published: int | None, engines: list[EngineView]) -> None:
    """Write the file of this attempt."""
    data = msgspec.json.encode(EngineViews(time=time.time(), published=published, engines=engines))
    write_atomic(rundir.here / VIEW, data)


def read_views(here: Path) -> EngineViews | None:
    """What the attempt in `here` (attempts/N) says of its engines; None if it has not said anything.

    HpcrlError if the file is damaged.
    """
    path = here / VIEW
    try:
        return read_json(path, EngineViews)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, Damaged) as error:
        raise HpcrlError(f"{path} is damaged, or of another version of hpcrl: {error}") from error
