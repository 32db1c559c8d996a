"""Which estimators, losses, corrections and KL estimators there are, and what each says of itself; without importing
them.

Each is one file of `hpcrl/algorithms/<kind>/`; its name is the option's value.  Besides its function it may declare, as
literals that are read here:
    NEEDS    what must be given or hold: see `NEEDS`
    OPTIONS  the options that it reads, beyond those that every algorithm reads: given with another, they have no effect
    LOSS     of an estimator, the policy loss that belongs to it (default: ppo)
    KL       of an estimator, what --kl-coef acts on: "token", its rewards of tokens, or "reward" (default)

Invariant: nothing is said of a file here but what stands in it, so a new file needs no second place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from hpcrl.toolbox.plugins import PluginRoom

Kind = Literal["estimators", "losses", "corrections", "kl"]
ROOM = Path(__file__).parents[1] / "algorithms"

#: what an algorithm may need
NEEDS = {
    "groups": "several responses to each prompt",
    "critic": "a value model",
    "normalize_advantages": "--normalize-advantages",
    "greedy": "the reward of a greedy response to each prompt",
    "teacher": "a teacher",
}
#: what a file may declare -> what it means to declare nothing
DEFAULTS = {"NEEDS": (), "OPTIONS": (), "LOSS": "ppo", "KL": "reward"}


@dataclass(frozen=True)
class AlgorithmFile:
    """What a file declares; title: the first line of its docstring."""

    title: str
    needs: tuple[str, ...]
    options: tuple[str, ...]
    loss: str
    kl: str


@cache
def algorithm_files(kind: Kind) -> dict[str, AlgorithmFile]:
    """Name -> what its file declares, of every file of a kind, by name."""
    room = PluginRoom(ROOM / kind)
    declared = {name: room.literals(name, DEFAULTS) for name in room.names()}
    return {
        name: AlgorithmFile(room.title(name), **{key.lower(): value for key, value in found.items()})
        for name, found in declared.items()
    }


def is_path(name: str) -> bool:
    """Whether a value is the dotted path of an own function, not the name of a file."""
    return "." in name


def find_algorithm_file(kind: Kind, name: str) -> AlgorithmFile | None:
    """What `name` declares.

    None for the dotted path of an own function, of which nothing is known before it is imported, and for a name that
    there is not: one rule refuses it (`config/rules/algorithm_rules.py`).
    """
    return algorithm_files(kind).get(name)
