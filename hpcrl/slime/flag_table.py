"""What becomes of each flag of slime's and vime's scripts: `flags.toml`, read and checked.

Invariant: a flag has one verdict; a verdict that names an option of hpcrl's is true of the options that are declared
now.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Way = Literal["option", "later", "is", "reader", "needless", "refused"]
TABLE = Path(__file__).with_name("flags.toml")
DEFAULTS = "defaults"  #: the section of flags.toml that holds values, not verdicts


@dataclass(frozen=True)
class Verdict:
    """What becomes of a flag.

    text: the reason (later, needless, refused), the flag that says the same here (is), or a function of readers.py
    (reader).
    default: slime's default, of a flag that says nothing when it is given with it; None: there is no such value.
    """

    way: Way
    text: str = ""
    default: Any = None


@cache
def verdicts() -> dict[str, Verdict]:
    """Flag, without dashes in front -> its verdict."""
    found: dict[str, Verdict] = {}
    for title, section in _document().items():
        if title == DEFAULTS:
            continue
        for flag, said in section.items():
            if flag in found and found[flag] != _verdict(flag, said):
                raise ValueError(f"{TABLE}: {flag} has two verdicts")
            found[flag] = _verdict(flag, said)
    return found


@cache
def other_defaults() -> dict[str, str]:
    """Flags whose default in slime trains otherwise than hpcrl's -> slime's, as a word of a command line."""
    return dict(_document()[DEFAULTS])


@cache
def _document() -> dict[str, dict[str, Any]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _verdict(flag: str, said: Any) -> Verdict:
    if said == "option":
        return Verdict("option")
    ways = [way for way in get_args(Way) if way in said]
    if len(ways) != 1 or not isinstance(said[ways[0]], str) or said.keys() - {ways[0], "default"}:
        raise ValueError(f"{TABLE}: {flag} = {said}")
    return Verdict(ways[0], said[ways[0]], said.get("default"))


def says_default(verdict: Verdict, values: list[str]) -> bool:
    """Whether the words after a flag only repeat slime's default."""
    default = verdict.default
    if default is None:
        return False
    if isinstance(default, bool):
        return default and not values
    if len(values) != 1:
        return False
    if isinstance(default, (int, float)):
        try:
            return float(values[0]) == default
        except ValueError:
            return False
    return values[0] == default
