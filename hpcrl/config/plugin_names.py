"""What registers itself by its file's name and is named by an option: rewards, estimators, losses, corrections and KL
estimators; without importing them.

A word of --rm-type is NAME, boxed_NAME or module.function, each with an optional weight behind a colon: `math`,
`boxed_gpqa`, `math:1.0 my_rewards.brief:0.1`.  A name is a file of hpcrl/rollout/rewards/.

An algorithm is one file of `hpcrl/algorithms/<kind>/`; its name is the option's value.  Besides its function it may
declare, as literals that are read here:
    NEEDS    what must be given or hold: see `NEEDS`
    OPTIONS  the options that it reads, beyond those that every algorithm reads: given with another, they have no effect
    LOSS     of an estimator, the policy loss that belongs to it (default: ppo)
    KL       of an estimator, what --kl-coef acts on: "token", its rewards of tokens, or "reward" (default)

Invariant: names and what is needed to check options come from the files' text alone, nothing is imported, so a new file
needs no second place, and a login node without the packages of the run refuses what the run would refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hpcrl.errors import UsageError
from hpcrl.utils.plugins import PluginFolder

Kind = Literal["estimators", "losses", "corrections", "kl"]
ALGORITHMS = Path(__file__).parents[1] / "algorithms"

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
    """What a file declares.

    Attributes:
        title: the first line of its docstring.
    """

    title: str
    needs: tuple[str, ...]
    options: tuple[str, ...]
    loss: str
    kl: str


@cache
def algorithm_files(kind: Kind) -> dict[str, AlgorithmFile]:
    """Name -> what its file declares, of every file of a kind, by name."""
    folder = PluginFolder(ALGORITHMS / kind)
    declared = {name: folder.literals(name, DEFAULTS) for name in folder.names()}
    return {
        name: AlgorithmFile(folder.title(name), **{key.lower(): value for key, value in found.items()})
        for name, found in declared.items()
    }


def is_path(name: str) -> bool:
    """Whether a value is the dotted path of a custom function, not the name of a file."""
    return "." in name


def find_algorithm_file(kind: Kind, name: str) -> AlgorithmFile | None:
    """What `name` declares.

    None for the dotted path of a custom function, of which nothing is known before it is imported, and for a name that
    there is not: one rule refuses it (`config/rules/algorithm.py`).
    """
    return algorithm_files(kind).get(name)


REWARDS = PluginFolder(Path(__file__).parents[1] / "rollout" / "rewards")
BOXED = "boxed_"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class RewardWord:
    """One reward of --rm-type.

    Attributes:
        word: without the weight.
        name: what its metric is called.
        file: the reward's file, "" for a custom function.
        boxed: whether it sees the boxed part of a response alone.
    """

    word: str
    name: str
    file: str
    boxed: bool
    weight: float


def plugin_names() -> tuple[str, ...]:
    """Every name, in order."""
    return REWARDS.names()


def declared(name: str) -> dict[str, Any]:
    """The constants that a reward's file declares (`hpcrl/rollout/rewards/__init__.py`)."""
    defaults = {"LABELS": ("text", "number", "truth", "list"), "METADATA": (), "KEYS": ()}
    return REWARDS.literals(name, defaults)


def read_words(rm_type: str | Sequence[str] | None) -> tuple[RewardWord, ...]:
    """The rewards of --rm-type.

    Raises:
        UsageError: for an unknown name (with the nearest), a bad weight, a name given twice.
    """
    words = [rm_type] if isinstance(rm_type, str) else list(rm_type or ())
    found = tuple(_read(word) for word in words)
    for number, item in enumerate(found):
        if item.name in (other.name for other in found[:number]):
            raise UsageError(
                f"--rm-type {' '.join(words)} names {item.name} twice", "give each reward once, with its weight"
            )
    return found


def own_reward(path: str) -> RewardWord:
    """The reward of a function of the user's own, module.function."""
    return RewardWord(path, path.rpartition(".")[2], "", False, 1.0)


def _read(word: str) -> RewardWord:
    name, colon, weight = word.partition(":")
    value = 1.0
    if colon:
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value == 0:
            raise UsageError(f"--rm-type {word}: {weight!r} is not a weight", "write NAME:WEIGHT, such as math:1.0")
    if _DOTTED.fullmatch(name):
        return RewardWord(name, name.rpartition(".")[2], "", False, value)
    file = file_of(name)
    if file is None:
        raise UsageError(f"--rm-type {name} is not a reward", _hint(name))
    return RewardWord(name, name, file, name != file, value)


def file_of(name: str) -> str | None:
    """The file of a reward's name, which may begin with boxed_; None if there is none."""
    known = plugin_names()
    bare = name.removeprefix(BOXED)
    return name if name in known else bare if bare in known else None


def _hint(name: str) -> str:
    boxed = BOXED if name.startswith(BOXED) else ""
    hint = REWARDS.hint(name.removeprefix(BOXED), "a function of your own is module.function")
    return hint.replace("did you mean ", f"did you mean {boxed}")


def needing_labels(words: Sequence[RewardWord]) -> list[str]:
    """Those of the rewards that compare with a label."""
    return [item.word for item in words if item.file and needs_label(item.file)]


def needs_label(file: str) -> bool:
    """Whether a reward's file compares with a label in every row."""
    said = declared(file)
    return bool(said["LABELS"]) and not said["METADATA"]


def check_key(words: Sequence[RewardWord], key: str, flag: str) -> None:
    """Raise UsageError if none of the rewards returns an object with this key, as far as that is known."""
    if any(not item.file or item.file == "remote_rm" for item in words):
        return
    keys = sorted({str(k) for item in words for k in declared(item.file)["KEYS"]})
    shown = " ".join(item.word for item in words)
    if not keys:
        raise UsageError(f"{flag} {key} has no effect here: --rm-type {shown} returns a number", "leave it out")
    if key not in keys:
        raise UsageError(f"{flag} {key}: --rm-type {shown} returns {', '.join(keys)}")
