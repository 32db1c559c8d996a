"""Prompt files as prompts: every row is checked once, before anything else of a run starts, and made again when it is
drawn.

Invariants: a prompt that leaves this module can be sampled from (or learned from) as it is: it has its label, its
tokens are within the vocabulary and leave room for a response.  Every row that cannot be so is a DataError with file
and line, or, where it is merely too long, dropped and counted.  No prompt is held.

A prompt's tokens are those of its own text, encoded alone, as an engine will see them; what is learned is encoded apart
from what stands before it, so a mask begins and ends between two tokens.  In a conversation the text before an
assistant's turn is, letter by letter, the prompt that the chat template makes of the messages before it, and the turn
ends with the token that ends a response: what is learned is what will be sampled.  A template, or a message, for which
that does not hold is refused; nothing is masked by guess.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.prompt_words import PromptWord, read_words
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.row_checks import ASSISTANT, Keys, Messages, PromptRow, keys_in, read_row
from hpcrl.rollout.prompts.rows import PromptRows, open_rows
from hpcrl.rollout.prompts.tokenizer import Tokenizer

CHUNK = 1024  #: rows that are encoded at once
MOST_TEXT = 1 << 23  #: characters of a prompt, or of what is learned after it: more than any model's context holds
LEARN = "step_loss_mask"  #: of an assistant's message: 0 leaves its turn out of the loss (slime's key)


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


def read_training(options: Options, tokenizer: Tokenizer) -> PromptFile:
    """The prompts of --prompt-data; none where nothing is trained.  UsageError and DataError say what is wrong with
    them."""
    if options.only_evaluates:
        return PromptFile(Path(), (), 0, "")
    words = read_words(options.prompt_data, "--prompt-data")
    if not words:
        raise UsageError("--prompt-data is not given")
    keys = Keys.from_options(options)
    given = tokenizer.given(options.apply_chat_template_kwargs)
    return joined(words, [read_prompts(word, keys, given) for word in words])


def read_prompts(word: PromptWord | str | Path, keys: Keys, tokenizer: Tokenizer) -> PromptFile:
    """Read and check a prompt file.

    Raises:
        DataError: names the file, and the line if one is at fault.
    """
    word = word if isinstance(word, PromptWord) else PromptWord(str(word), str(word))
    if keys.chat_template:
        tokenizer.need_template()
    rows = open_rows(word)
    drawn = Drawn(rows, keys, tokenizer)
    kept = drawn.check()
    dropped = len(rows) - len(kept)
    if not len(kept):
        raise DataError(
            f"{word.word}: each of its {dropped} prompts is longer than the limit of {drawn.limit} tokens",
            f"raise {keys.flags}",
        )
    drawn.kept = kept if dropped else None
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
    """The prompts of one file, each made when it is drawn.

    Attributes:
        limit: tokens of a prompt at most, None: no limit.
        kept: int64, the row of each prompt; None: every row is one.
        types: the rm_type of rows' metadata -> where it stands first.
    """

    def __init__(self, rows: PromptRows, keys: Keys, tokenizer: Tokenizer) -> None:
        self._rows = rows
        self._keys = keys_in(rows, keys)
        self._tokenizer = tokenizer
        self._context = context = keys.max_context or tokenizer.context
        self.limit = min((n for n in (keys.max_prompt, context and context - 1) if n), default=None)
        self.kept: np.ndarray | None = None
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
            row.metadata | self._keys.overrides,
            *(*tokens.targets, None, None)[:2],
            row.learned[1] if len(row.learned) > 1 else None,
            tokens.mask if self._keys.conversation else None,
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
                name = row.metadata.get("rm_type") if self._keys.own_types else None
                if name is not None and name.strip():
                    self.types.setdefault(name.strip(), self._rows.where(at))
                text = self._render(at, row)
                parts = (text.prompt, *(piece for target in text.targets for piece, _ in target))
                if max(map(len, parts)) > MOST_TEXT:
                    continue
                if not text.targets and self._tokenizer.surely_within(text.prompt, self.limit):
                    kept.append(at)
                else:
                    unsure[at] = text
            measured = zip(unsure, encode([*unsure.values()], self._tokenizer), strict=True)
            kept.extend(at for at, tokens in measured if self._fits(at, tokens))
        return np.sort(np.asarray(kept, np.int64))

    def _row(self, at: int) -> PromptRow:
        return read_row(self._rows.where(at), self._rows[at], self._keys)

    def _render(self, at: int, row: PromptRow) -> RenderedRow:
        try:
            return render(row, self._keys, self._tokenizer)
        except ValueError as error:
            raise DataError(f"{self._rows.where(at)}: {error}") from error

    def _fits(self, at: int, tokens: EncodedRow) -> bool:
        """Whether a prompt is within the limits.

        Raises:
            DataError: if it is empty.
        """
        length = len(tokens.prompt)
        if not length:
            raise DataError(f"{self._rows.where(at)}: the prompt is empty")
        longest = length + max(map(len, tokens.targets), default=0)
        return length <= (self.limit or length) and longest <= (self._context or longest)


# ---- from what a row says to texts, and to token ids

Piece = tuple[str, bool]  #: of a text, and whether it is learned


class RenderedRow(NamedTuple):
    """The text of a prompt, and of the responses to learn after it, in pieces: a conversation has one."""

    prompt: str
    targets: Sequence[Sequence[Piece]] = ()


class EncodedRow(NamedTuple):
    """One row as token ids: int32 [prompt]; int32 [response] of each target; uint8 [response], which tokens of the
    first target are learned."""

    prompt: np.ndarray
    targets: Sequence[np.ndarray] = ()
    mask: np.ndarray | None = None


def pieces(messages: Messages, tools: Sequence[Any] | None, template: Tokenizer) -> list[Piece]:
    """The conversation in pieces: the prompt of the first assistant's turn, that turn, what stands before the next, and
    so on.

    It ends with the last assistant's turn.

    Raises:
        ValueError: names the turn whose text cannot be found, and says why.
    """
    clean = [{key: value for key, value in message.items() if key != LEARN} for message in messages]
    ends = template.end_texts()
    whole = template.render(clean, False, tools)
    found: list[Piece] = []
    at = 0
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    for number in turns:
        before = template.render(clean[:number], True, tools)
        if not whole.startswith(before) or len(before) < at:
            raise ValueError(
                f"the text of message {number + 1} cannot be found: the chat template renders a longer conversation "
                "without this turn's prompt as its beginning; make the conversation end here, or learn from --label-key"
            )
        last = number == turns[-1]
        end = _end_of_turn(whole, len(before), ends, clean[number], number, last)
        found += [
            (whole[at : len(before)], False),
            (whole[len(before) : end], bool(messages[number].get(LEARN, 1))),
        ]
        at = end
    if not any(learned for _, learned in found):
        raise ValueError(f"no message is left to learn: {LEARN} leaves all of them out")
    return found


def _end_of_turn(whole: str, start: int, ends: Sequence[str], message: dict[str, Any], number: int, last: bool) -> int:
    """Where the turn that begins at `start` ends: behind the first token that ends a response."""
    said = [str(message[key]).strip() for key in ("reasoning_content", "content") if message.get(key)]
    for text in ends:
        if any(text in part for part in said):
            raise ValueError(f"message {number + 1} holds {text}, the token that ends a turn")
    places = [place + len(text) for text in ends if (place := whole.find(text, start)) >= 0]
    if not places and not last:
        raise ValueError(
            f"the chat template ends message {number + 1} with no end-of-sequence token "
            f"({', '.join(ends) or 'the model has none'}): the end of the turn is unknown"
        )
    end = min(places, default=len(whole))
    turn = whole[start:end]
    for part in said:
        if part not in turn:
            raise ValueError(
                f"the chat template leaves out a part of message {number + 1} (a thought, usually, when another turn "
                "follows); make the conversation end with this turn, or take the thought out"
            )
    return end


def render(row: PromptRow, keys: Keys, tokenizer: Tokenizer) -> RenderedRow:
    """The texts of a row.

    Raises:
        ValueError: if the chat template refuses it, or the text of a turn cannot be found.
    """
    if row.messages is not None and keys.conversation:
        first, *rest = pieces(row.messages, row.tools, tokenizer)
        return RenderedRow(first[0], [rest])
    text = str(row.text) if row.messages is None else tokenizer.render(row.messages, True, row.tools)
    said = [tokenizer.target(row.messages, text, str(label), row.tools) for label in row.learned]
    return RenderedRow(text, [[(one, True)] for one in said])


def encode(texts: Sequence[RenderedRow], tokenizer: Tokenizer) -> list[EncodedRow]:
    """The tokens of each, encoded in one call; a target ends with an end-of-sequence token."""
    prompts = tokenizer.encode([text.prompt for text in texts])
    ids = iter(tokenizer.encode([piece for text in texts for target in text.targets for piece, _ in target]))
    found = []
    for text, prompt in zip(texts, prompts, strict=True):
        targets, masks = [], []
        for target in text.targets:
            parts = [next(ids) for _ in target]
            parts[-1] = tokenizer.ended(parts[-1])
            targets.append(np.concatenate(parts))
            masks.append(np.repeat(np.array([learned for _, learned in target], np.uint8), [*map(len, parts)]))
        found.append(EncodedRow(prompt, targets, masks[0] if masks else None))
    return found
