"""What becomes of one flag of slime's or vime's.

Invariant: a reading that is `translated` or `kept` has the words that say the same here; one that is not says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Given = Mapping[str, Sequence[str]]  #: flag, without dashes in front -> the words after it


@dataclass(frozen=True)
class FlagReading:
    """What becomes of one flag.

    Attributes:
        words: the command line that says the same here, () if nothing needs to be said.
    """

    outcome: Literal["kept", "translated", "needless", "refused"]
    words: tuple[str, ...] = ()
    why: str = ""


def one(given: Given, flag: str, default: str = "") -> str:
    """The one word after a flag."""
    words = given.get(flag, ())
    return words[0] if len(words) == 1 else default


def number(text: str) -> float:
    """A word as a number; NaN if it is not a number, which the option itself refuses."""
    try:
        return float(text)
    except ValueError:
        return math.nan
