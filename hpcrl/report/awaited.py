"""What a run that comes up is waiting for, in a few words.

Invariant: it only looks at which files of the attempt are there; it never fails.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.run.peers import EnginePeer, StorePeer, TrainerPeer, peer_file
from hpcrl.run.rundir import RunDir, listed

_ENGINE = re.compile(rf"{EnginePeer.role}-(\d+)\.")


class _Plan(msgspec.Struct):
    """What counts here of an attempt's plan."""

    trainers: list[Any] = []
    engines: list[Any] = []


def awaited(rundir: RunDir) -> str:
    """`waiting for engines, 1 of 4 up`; of an attempt that is up `first step`, which it is until a step is logged."""
    try:
        plan = read_json(rundir.plan_file, _Plan, strict=False)
        names = listed(rundir.here / "peers")
    except (OSError, Damaged, HpcrlError):
        return "looking for hosts"
    if peer_file(rundir.here, TrainerPeer, 0).name in names:
        return "first step"
    if plan.trainers and peer_file(rundir.here, StorePeer, 0).name not in names:
        return "starting processes"
    up = len({match[1] for name in names if (match := _ENGINE.match(name))})
    if up < len(plan.engines):
        return f"waiting for engines, {up} of {len(plan.engines)} up"
    return "loading the model" if plan.trainers else "loading the prompts"
