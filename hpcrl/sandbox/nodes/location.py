"""Where a run's sandboxes are: the rollout process says it, the processes that run the user's code follow.

Invariant: the location is in the environment, which every process below the rollout process has, and holds no key.
"""

from __future__ import annotations

import os
from functools import partial

import msgspec

from hpcrl.config.options import Options
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox.pool import SandboxPool, make_default_with

VARIABLE = "HPCRL_SANDBOXES"


class SandboxPlace(msgspec.Struct, frozen=True):
    """Where `hpcrl.sandbox.sandbox()` takes its boxes from.

    Attributes:
        nodes: how many nodes of attempt `attempt` of `run` have sandboxes; 0: they are on this machine.
        kind: of a pool on this machine.
    """

    run: str
    attempt: int
    nodes: int
    kind: str | None = None


def say_where(rundir: RunDir, options: Options, nodes: int) -> None:
    """Say it to the processes that this one starts."""
    place = SandboxPlace(
        str(rundir.root),
        rundir.attempt,
        nodes,
        options.sandbox_kind,
    )
    os.environ[VARIABLE] = msgspec.json.encode(place).decode()


def follow() -> None:
    """Have `default_pool()` of this process take boxes from where the rollout process has said, if it has."""
    if not (said := os.environ.get(VARIABLE)):
        return
    place = msgspec.json.decode(said, type=SandboxPlace)
    if not place.nodes:
        make_default_with(partial(SandboxPool, kind=place.kind))
        return
    from hpcrl.sandbox.nodes.client import NodesPool

    make_default_with(partial(NodesPool, RunDir(place.run, place.attempt), place.nodes))
