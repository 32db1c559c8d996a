"""The rewards that --rm-type may name, and how it names them.

A word of --rm-type is NAME, boxed_NAME or module.function, each with an optional weight behind a colon: `math`,
`boxed_gpqa`, `math:1.0 my_rewards.brief:0.1`.  A name is a file of hpcrl/rollout/rewards/.

Invariant: names and what is needed to check options come from the files' text alone, nothing is imported, so a login
node without the packages of the rollout process refuses what that process would refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.toolbox.plugins import PluginRoom

REWARDS = PluginRoom(Path(__file__).parents[1] / "rollout" / "rewards")
BOXED = "boxed_"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class RewardWord:
    """One reward of --rm-type.

    word: without the weight; name: what its metric is called; file: the reward's file, "" for an own function; boxed:
    whether it sees the boxed part of a response alone.
    """

    word: str
    name: str
    file: str
    boxed: bool
    weight: float


def reward_names() -> tuple[str, ...]:
    """Every name, in order."""
    return REWARDS.names()


def declared(name: str) -> dict[str, Any]:
    """The constants that a reward's file declares: NEEDS_LABEL (default true), KEYS (of its result; default none)."""
    return REWARDS.literals(name, {"NEEDS_LABEL": True, "KEYS": ()})


def read_words(rm_type: str | Sequence[str] | None) -> tuple[RewardWord, ...]:
    """The rewards of --rm-type.  UsageError for an unknown name (with the nearest), a bad weight, a name given
    twice."""
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
    known = reward_names()
    bare = name.removeprefix(BOXED)
    return name if name in known else bare if bare in known else None


def _hint(name: str) -> str:
    boxed = BOXED if name.startswith(BOXED) else ""
    hint = REWARDS.hint(name.removeprefix(BOXED), "a function of your own is module.function")
    return hint.replace("did you mean ", f"did you mean {boxed}")


def needing_labels(words: Sequence[RewardWord]) -> list[str]:
    """Those of the rewards that compare with a label."""
    return [item.word for item in words if item.file and declared(item.file)["NEEDS_LABEL"]]


def check_key(words: Sequence[RewardWord], key: str, flag: str) -> None:
    """UsageError if none of the rewards returns an object with this key, as far as that is known."""
    if any(not item.file or item.file == "remote_rm" for item in words):
        return
    keys = sorted({str(k) for item in words for k in declared(item.file)["KEYS"]})
    shown = " ".join(item.word for item in words)
    if not keys:
        raise UsageError(f"{flag} {key} has no effect here: --rm-type {shown} returns a number", "leave it out")
    if key not in keys:
        raise UsageError(f"{flag} {key}: --rm-type {shown} returns {', '.join(keys)}")
