"""Prompt files: from .jsonl lines to token ids, once, before anything else of a run starts.

Invariant: a prompt that leaves this module can be sampled from (or learned from) as it is: it has its label, its tokens
are within the vocabulary and leave room for a response.  Every line that cannot be so is a DataError with file and line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import label_key
from hpcrl.errors import DataError
from hpcrl.rollout.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file.

    raw: the prompt as it stands there; tokens: int32 [prompt], rendered; target: int32 [response], the tokens to learn
    after it, rejected: those of the worse response, whose text is worse (only where the file's responses are learned).
    """

    line: int
    raw: Any
    tokens: np.ndarray
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    target: np.ndarray | None = None
    rejected: np.ndarray | None = None
    worse: Any = None


@dataclass(frozen=True)
class PromptFile:
    """A prompt file that has been read, and what identifies its content."""

    path: Path
    prompts: tuple[Prompt, ...]
    size: int
    sha256: str

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Reading:
    """How to read a prompt file.

    label_key None: labels are not wanted.  limit: tokens of a prompt at most; context: of prompt and target together;
    None: no limit.  learned: the keys of responses that are learned, whose tokens are made too: the label's, or the better
    one's and the worse one's.
    """

    input_key: str
    label_key: str | None
    metadata_key: str
    chat_template: bool
    limit: int | None
    context: int | None
    learned: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Options, tokenizer: Tokenizer, evaluation: bool = False) -> Reading:
        """As the options ask for.  UsageError if the reward or the loss needs labels and no key is given."""
        learns, label = options.learns_labels and not evaluation, label_key(options, evaluation)
        context = options.rollout_max_context_len or tokenizer.context
        limits = [n for n in (options.rollout_max_prompt_len, context and context - 1) if n]
        return cls(
            (options.eval_input_key if evaluation else None) or options.input_key,
            label,
            options.metadata_key,
            options.apply_chat_template,
            min(limits, default=None),
            context,
            tuple(key for key in (label, options.rejected_key) if key is not None) if learns else (),
        )


def read_prompts(path: str | Path, reading: Reading, tokenizer: Tokenizer) -> PromptFile:
    """Read, check and tokenize a .jsonl file.  DataError names the file, and the line if one is at fault."""
    path = Path(path)
    if reading.chat_template:
        tokenizer.need_template()
    digest, size = hashlib.sha256(), 0
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in _lines(path):
        digest.update(line)
        size += len(line)
        if line.strip():
            rows.append((number, _row(path, number, line)))
    if not rows:
        raise DataError(f"{path} holds no prompts", "one JSON object a line is wanted")
    prompts = tuple(_prompts(path, rows, reading, tokenizer))
    return PromptFile(path, prompts, size, digest.hexdigest())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if path.suffix != ".jsonl":
        raise DataError(f"{path} is no .jsonl file", "prompt files have one JSON object a line and end in .jsonl")
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error.strerror}") from error


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad(path, number, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _bad(path, number, f"not a JSON object but {_kind(row)}")
    return row


def _prompts(path: Path, rows: list[tuple[int, dict[str, Any]]], reading: Reading, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Render every row, tokenize all at once, check every length."""
    texts = [_render(path, number, row, reading, tokenizer) for number, row in rows]
    tokens = tokenizer.encode([text for text, _ in texts])
    columns = [tokenizer.targets([targets[i] for _, targets in texts]) for i in range(len(reading.learned))]
    for place, ((number, row), ids) in enumerate(zip(rows, tokens, strict=True)):
        targets = [column[place] for column in columns]
        _check_lengths(path, number, ids, max(map(len, targets), default=0), reading)
        label = row[reading.label_key] if reading.label_key is not None else None
        found = Prompt(number, row[reading.input_key], ids, label, _metadata(path, number, row, reading), *targets)
        yield replace(found, worse=row[reading.learned[1]]) if len(targets) > 1 else found


def _render(path: Path, number: int, row: dict[str, Any], reading: Reading, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The text of the prompt and of each response that is to be learned after it."""
    keys = {reading.input_key: "--input-key", reading.label_key: "--label-key"}
    for key, flag in (dict.fromkeys(reading.learned, "--rejected-key") | keys).items():
        if key is not None and row.get(key) is None:
            what = f"{key!r} is null" if key in row else f"no key {key!r}"
            raise _bad(path, number, what, f"its keys are {', '.join(sorted(row))}; {flag} chooses one")
    prompt, messages = row[reading.input_key], None
    if isinstance(prompt, list):
        _check_messages(path, number, prompt)
        if not reading.chat_template:
            raise _bad(path, number, "the prompt is a list of chat messages", "give --apply-chat-template")
        messages = prompt
    elif not isinstance(prompt, str):
        raise _bad(path, number, f"the prompt is neither text nor a list of chat messages but {_kind(prompt)}")
    elif reading.chat_template:
        messages = [{"role": "user", "content": prompt}]
    for key in reading.learned:
        if isinstance(row[key], bool) or not isinstance(row[key], str | int | float):
            said = "the label" if key == reading.label_key else f"the worse response ({key!r})"
            raise _bad(path, number, f"{said} is neither text nor a number but {_kind(row[key])}")
    try:
        text = prompt if messages is None else tokenizer.render(messages, generation=True)
        return text, [tokenizer.target(messages, text, str(row[key])) for key in reading.learned]
    except ValueError as error:
        raise _bad(path, number, str(error)) from error


def _check_messages(path: Path, number: int, messages: list[Any]) -> None:
    if not messages:
        raise _bad(path, number, "the prompt is an empty list")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise _bad(path, number, "a chat message of the prompt is not an object with role and content as text")


def _check_lengths(path: Path, number: int, tokens: np.ndarray, target: int, reading: Reading) -> None:
    hint = "shorten it, or raise --rollout-max-prompt-len or --rollout-max-context-len"
    if not len(tokens):
        raise _bad(path, number, "the prompt is empty")
    if reading.limit is not None and len(tokens) > reading.limit:
        raise _bad(path, number, f"the prompt is {len(tokens)} tokens long, the limit is {reading.limit}", hint)
    total = len(tokens) + target
    if reading.context is not None and total > reading.context:
        raise _bad(path, number, f"prompt and label together are {total} tokens long, the limit is {reading.context}", hint)


def _metadata(path: Path, number: int, row: dict[str, Any], reading: Reading) -> dict[str, Any]:
    found = row.get(reading.metadata_key)
    if found is not None and not isinstance(found, dict):
        raise _bad(path, number, f"{reading.metadata_key!r} is not a JSON object but {_kind(found)}")
    return found or {}


def _bad(path: Path, number: int, what: str, hint: str = "") -> DataError:
    return DataError(f"{path}, line {number}: {what}", hint)


def _kind(value: Any) -> str:
    """A JSON value's kind, for a message."""
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
