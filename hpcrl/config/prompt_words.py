"""How --prompt-data and the evaluation name a prompt file: PATH, PATH@[START:STOP], and for a mixture PATH=WEIGHT.

    train.jsonl                      all of it
    train.parquet@[:1000]            its first thousand rows, as Python slices: negative numbers count from the end
    math.jsonl=3 code.jsonl@[5:]=1   three prompts of the first for one of the second
    tasks   tasks/@[:100]            a folder of task folders in Harbor's form, which ends in / before a slice or weight

Invariant: pure functions of the words; whether a file is there is not asked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.errors import UsageError

KINDS = (".jsonl", ".parquet")  #: how the name of a prompt file ends
_WORD = re.compile(r"(?P<path>.+?(?:\.jsonl|\.parquet|/))(?:@\[(?P<slice>[^\]]*)\])?(?:=(?P<weight>[^/=]*))?")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


@dataclass(frozen=True)
class PromptWord:
    """One prompt file.

    Attributes:
        word: as it was given.
        start, stop: of the slice of its rows.
        weight: None without one.
    """

    word: str
    path: str
    start: int | None = None
    stop: int | None = None
    weight: float | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def whole(self) -> bool:
        """Whether all rows are taken."""
        return self.start is None and self.stop is None


def read_word(word: str, flag: str) -> PromptWord:
    """What `word` names.

    Raises:
        UsageError: naming `flag`, for an invalid slice or weight.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        if "@[" in word:
            raise UsageError(
                f"{flag} {word} is not a slice of a .jsonl or .parquet file",
                "write PATH@[START:STOP], and PATH/@[START:STOP] for a folder of tasks",
            )
        return PromptWord(word, word)
    start = stop = weight = None
    if (text := match["slice"]) is not None:
        if (found := _SLICE.fullmatch(text)) is None:
            raise UsageError(
                f"{flag} {word}: [{text}] is not a slice", "write PATH@[START:STOP], such as train.jsonl@[:1000]"
            )
        start, stop = (int(part) if part else None for part in found.groups())
    if (text := match["weight"]) is not None:
        weight = _weight(text)
        if weight is None:
            raise UsageError(f"{flag} {word}: {text!r} is not a weight", "write PATH=WEIGHT, a number above 0")
    return PromptWord(word, match["path"], start, stop, weight)


def read_words(words: str | Sequence[str] | None, flag: str) -> tuple[PromptWord, ...]:
    """The prompt files of a mixture.

    Raises:
        UsageError: for a file given twice, or where some have a weight and others none.
    """
    found = tuple(read_word(word, flag) for word in ([words] if isinstance(words, str) else words or ()))
    given = [word.word.rpartition("=")[0] if word.weight is not None else word.word for word in found]
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise UsageError(f"{flag} names {twice[0]} twice", "give it once, with a weight: PATH=WEIGHT")
    weighted = [word for word in found if word.weight is not None]
    if weighted and len(weighted) < len(found):
        bare = next(word.word for word in found if word.weight is None)
        raise UsageError(
            f"{flag}: {bare} has no weight, {weighted[0].word} has one", "give each file a weight, or none"
        )
    if len(found) == 1 and weighted:
        raise UsageError(f"{flag} {found[0].word}: a single file's weight has no effect", "leave it out")
    return found


def _weight(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
