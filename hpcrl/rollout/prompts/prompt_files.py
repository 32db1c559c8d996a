"""Prompt files as prompts: every row is checked once, before anything else of a run starts, and made again when it is
drawn.

Invariant: a prompt that leaves this module can be sampled from (or learned from) as it is: it has its label, its tokens
are within the vocabulary and leave room for a response.  Every row that cannot be so is a DataError with file and line,
or, where it is merely too long, dropped and counted.  Held are 8 bytes a row (16 where rows were dropped), and no
prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.config.eval_sets import EvalSet
from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord, read_words
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.rendering import EncodedRow, RenderedRow, encode, render
from hpcrl.rollout.prompts.row_checks import Keys, PromptRow, keys_in, read_row
from hpcrl.rollout.prompts.rows import PromptRows, open_rows
from hpcrl.rollout.prompts.tokenizer import Tokenizer

CHUNK = 1024  #: rows that are encoded at once
MOST_TEXT = 1 << 23  #: characters of a prompt, or of what is learned after it: more than any model's context holds


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file.

    Attributes:
        where: its file and line.
        raw: the prompt as it is there.
        tokens: int32 [prompt], rendered.
        target: int32 [response], the tokens to learn after it.
        mask: uint8 [response], which of them are learned (None: all).
        rejected: those of the worse response, whose text is worse (only where what the file holds is learned).
    """

    raw: Any
    tokens: np.ndarray
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    target: np.ndarray | None = None
    rejected: np.ndarray | None = None
    worse: Any = None
    mask: np.ndarray | None = None
    where: str = ""


@dataclass(frozen=True)
class PromptFile:
    """A prompt file, or several as one, and what identifies the content.

    Attributes:
        size: bytes.
        sha256: of the file, or of what identifies each of several.
        dropped: rows that are too long.
        types: the rm_type of rows' metadata -> where it stands first.
        parts: (number of prompts, weight) of each file of a mixture.
    """

    path: Path
    prompts: Sequence[Prompt]
    size: int
    sha256: str
    dropped: int = 0
    types: dict[str, str] = field(default_factory=dict)
    parts: tuple[tuple[int, float], ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        said = f"{len(self)} prompts in {self.path}"
        return f"{said} ({self.dropped} more were dropped: too long)" if self.dropped else said


@dataclass(frozen=True)
class ReadOptions:
    """How to read a prompt file.

    Attributes:
        limit: tokens of a prompt at most.
        context: of prompt and target together; None: no limit.
        overrides: take the place of the metadata's.
        flags: what sets the limits, for an error.
    """

    keys: Keys
    limit: int | None
    context: int | None
    overrides: dict[str, Any] = field(default_factory=dict)
    flags: str = "--rollout-max-prompt-len or --rollout-max-context-len"

    @classmethod
    def from_options(cls, options: Options, tokenizer: Tokenizer) -> ReadOptions:
        """Of the training prompts.

        Raises:
            UsageError: if the reward or the loss needs labels and no key is given.
        """
        context = options.rollout_max_context_len or tokenizer.context
        return cls(
            Keys.from_options(options),
            _limit(options.rollout_max_prompt_len, context),
            context,
        )

    @classmethod
    def of_set(cls, held: EvalSet, tokenizer: Tokenizer) -> ReadOptions:
        """Of a held-out set."""
        context = held.max_context_len or tokenizer.context
        return cls(
            Keys.of_set(held),
            _limit(held.max_prompt_len, context),
            context,
            dict(held.metadata_overrides),
            "--eval-max-prompt-len or --eval-max-context-len",
        )


def _limit(prompt: int | None, context: int | None) -> int | None:
    return min((n for n in (prompt, context and context - 1) if n), default=None)


def read_training(options: Options, tokenizer: Tokenizer) -> PromptFile:
    """The prompts of --prompt-data; none where nothing is trained.  UsageError and DataError say what is wrong with
    them."""
    if options.only_evaluates:
        return PromptFile(Path(), (), 0, "")
    words = read_words(options.prompt_data, "--prompt-data")
    if not words:
        raise UsageError("--prompt-data is not given")
    reading = ReadOptions.from_options(options, tokenizer)
    given = tokenizer.given(options.apply_chat_template_kwargs)
    return joined(words, [read_prompts(word, reading, given) for word in words])


def read_prompts(word: PromptWord | str | Path, reading: ReadOptions, tokenizer: Tokenizer) -> PromptFile:
    """Read and check a prompt file.

    Raises:
        DataError: names the file, and the line if one is at fault.
    """
    word = word if isinstance(word, PromptWord) else PromptWord(str(word), str(word))
    if reading.keys.chat_template:
        tokenizer.need_template()
    rows = open_rows(word)
    drawn = Drawn(rows, reading, tokenizer)
    kept = drawn.check()
    dropped = len(rows) - len(kept)
    if not len(kept):
        raise DataError(
            f"{word.word}: each of its {dropped} prompts is longer than the limit of {reading.limit} tokens",
            f"raise {reading.flags}",
        )
    if dropped:
        drawn.kept = kept
    identity = (
        rows.sha256 if word.whole else hashlib.sha256(f"{rows.sha256} {word.start} {word.stop}".encode()).hexdigest()
    )
    return PromptFile(Path(word.path), drawn, rows.size, identity, dropped, drawn.types)


def joined(words: Sequence[PromptWord], files: Sequence[PromptFile]) -> PromptFile:
    """Several files as one: all of their prompts, or with weights a mixture."""
    if len(files) == 1:
        return files[0]
    identity = "".join(f"{file.sha256} {word.weight}\n" for word, file in zip(words, files, strict=True))
    weighted = words[0].weight is not None
    return PromptFile(
        Path(" ".join(word.word for word in words)),
        Chained([file.prompts for file in files]),
        sum(file.size for file in files),
        hashlib.sha256(identity.encode()).hexdigest(),
        sum(file.dropped for file in files),
        {name: where for file in reversed(files) for name, where in file.types.items()},
        tuple((len(file), word.weight or 0.0) for word, file in zip(words, files, strict=True)) if weighted else (),
    )


class Chained(Sequence[Prompt]):
    """The prompts of several files, one file after another."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


class Drawn(Sequence[Prompt]):
    """The prompts of one file, each made when it is drawn."""

    def __init__(self, rows: PromptRows, reading: ReadOptions, tokenizer: Tokenizer) -> None:
        self._rows = rows
        self._reading = replace(reading, keys=keys_in(rows, reading.keys))
        self._tokenizer = tokenizer
        self.kept: np.ndarray | None = None  #: int64: the row of each prompt; None: every row is one
        self.types: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._rows) if self.kept is None else len(self.kept)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = index if self.kept is None else int(self.kept[index])
        row = self._row(at)
        (tokens,) = encode([self._render(at, row)], self._tokenizer)
        return Prompt(
            row.raw,
            tokens.prompt,
            row.label,
            row.metadata | self._reading.overrides,
            *(*tokens.targets, None, None)[:2],
            row.learned[1] if len(row.learned) > 1 else None,
            tokens.mask if self._reading.keys.conversation else None,
            self._rows.where(at),
        )

    def check(self) -> np.ndarray:
        """Look at every row: int64, those that are not too long. Fills `types`.

        Only what may be too long is encoded, which takes most of the time, and memory of two hundred times its length.

        Raises:
            DataError: as `read_prompts`.
        """
        kept = array("q")
        for begin in range(0, len(self._rows), CHUNK):
            unsure: dict[int, RenderedRow] = {}
            for at in range(begin, min(begin + CHUNK, len(self._rows))):
                row = self._row(at)
                name = row.metadata.get("rm_type") if self._reading.keys.own_types else None
                if name is not None and name.strip():
                    self.types.setdefault(name.strip(), self._rows.where(at))
                text = self._render(at, row)
                parts = (text.prompt, *(piece.text for target in text.targets for piece in target))
                if max(map(len, parts)) > MOST_TEXT:
                    continue
                if not text.targets and self._tokenizer.surely_within(text.prompt, self._reading.limit):
                    kept.append(at)
                else:
                    unsure[at] = text
            measured = zip(unsure, encode([*unsure.values()], self._tokenizer), strict=True)
            kept.extend(at for at, tokens in measured if self._fits(at, tokens))
        return np.sort(np.asarray(kept, np.int64))

    def _row(self, at: int) -> PromptRow:
        return read_row(self._rows.where(at), self._rows[at], self._reading.keys)

    def _render(self, at: int, row: PromptRow) -> RenderedRow:
        try:
            return render(row, self._reading.keys, self._tokenizer)
        except ValueError as error:
            raise DataError(f"{self._rows.where(at)}: {error}") from error

    def _fits(self, at: int, tokens: EncodedRow) -> bool:
        """Whether a prompt is within the limits.

        Raises:
            DataError: if it is empty.
        """
        reading, length = self._reading, len(tokens.prompt)
        if not length:
            raise DataError(f"{self._rows.where(at)}: the prompt is empty")
        if reading.limit is not None and length > reading.limit:
            return False
        return reading.context is None or tokens.total <= reading.context
