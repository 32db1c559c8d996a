"""Samples as lines of styled words: one in full, with its transcript or without, and two side by side.

A transcript is what the policy wrote and was told, turn by turn, and what it did in sandboxes.

Invariants: pure; of a transcript that is damaged there are the turns that can be read, or the response as the one
turn; whatever a prompt or a response holds, nothing of it reaches a terminal as a command: control characters, and
those that change the direction of text or hide it, are shown as visible signs.
"""

from __future__ import annotations

import heapq
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from hpcrl.plan import folded
from hpcrl.report.run_status import span
from hpcrl.report.sample_records import Look, Record, Trained

Which = Literal["first", "worst", "best", "truncated"]
JOINERS = "\u200c\u200d"  #: of scripts and of emoji; harmless
LARGE = 0.1  #: a difference of log-probs that is worth a colour
TAB = 4
LISTED = 10  #: runs of numbers that are listed one by one
POLICY, TOLD, SANDBOXES = "the policy", "told", "in sandboxes"
STYLES = {TOLD: "cyan", SANDBOXES: "dim"}


class Word(NamedTuple):
    """A piece of a line.

    Attributes:
        style: rich's, "" for none.
    """

    text: str
    style: str = ""


Line = tuple[Word, ...]


def visible(text: str) -> str:
    """Text in which nothing is obeyed by a terminal, on as many lines as it has."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if character == "\n" else _visible(character) for character in text.expandtabs(TAB))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if not character.isprintable() and character not in JOINERS and unicodedata.category(character) != "Zs":
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


# ---- which


def choose(looks: Iterable[Look], which: Which, count: int, group: int | None = None) -> list[Look]:
    """`count` samples: the first, those of the least or the greatest reward, or the first that were cut off."""
    found = (look for look in looks if group in (None, look.record.group))
    if which == "worst":
        return heapq.nsmallest(count, found, key=lambda look: (_number(look.record.reward), look.at))
    if which == "best":
        return heapq.nsmallest(count, found, key=lambda look: (-_number(look.record.reward), look.at))
    kept = (look for look in found if which == "first" or look.record.status == "truncated")
    return [look for look, _ in zip(kept, range(count), strict=False)]


def _number(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


# ---- one


def sample_lines(look: Look, title: str, transcript: bool = False) -> Iterator[Line]:
    """A sample in full; with `transcript` its turns are in place of its response."""
    yield from head_lines(look.record, look.trained, title)
    styles = STYLES | {"response": _reward_style(look.record)}
    for name, text in texts(look.record, transcript):
        yield from field_lines(name, text, styles.get(name, ""))
    yield ()


def texts(record: Record, transcript: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of its prompt, its label if it has one, and its response or its transcript."""
    yield "prompt", as_text(record.prompt)
    if record.label is not None:
        yield "label", as_text(record.label)
    yield from parts(record) if transcript else [("response", record.response)]


def head_lines(record: Record, trained: Trained | None, title: str) -> Iterator[Line]:
    """Its numbers."""
    parts = ", ".join(f"{visible(name)} {value:.4g}" for name, value in record.rewards.items())
    words = [
        Word(f"{title}group {record.group}, sample {record.index}", "bold"),
        Word(f"  reward {record.reward:.4g}", _reward_style(record)),
        Word(f" ({parts})" if parts else ""),
        Word("" if record.baseline is None else f", greedy {record.baseline:.4g}"),
        Word(f"  {visible(record.status)}", "yellow" if record.status == "truncated" else ""),
        Word(f", {record.prompt_len} + {record.response_len} tokens"),
    ]
    if len(record.versions) > 1:
        words.append(Word(f", policy versions {min(record.versions)} to {max(record.versions)}"))
    if trained is not None and trained.advantage is not None:
        words.append(Word(f"  advantage {trained.advantage:+.4g}", "green" if trained.advantage > 0 else "red"))
    yield tuple(word for word in words if word.text)
    if trained is not None:
        yield tuple(_logprobs(trained))
    if record.grading:
        yield (Word(f"  not graded ({visible(record.grading)}): {visible(record.grading_error)}", "red"),)


def _logprobs(trained: Trained) -> Iterator[Word]:
    yield Word(f"  log-prob a token: trainer {trained.trainer:.4g}")
    if trained.engine is not None and trained.differ is not None and trained.differ_max is not None:
        yield Word(f", engine {trained.engine:.4g}")
        style = "red" if trained.differ_max > LARGE else ""
        yield Word(f"; they differ by {trained.differ:.2g}, at most {trained.differ_max:.2g}", style)
    yield Word(f"; {trained.tokens} trained")


def _reward_style(record: Record) -> str:
    return "green" if record.reward > 0 else "red"


def field_lines(name: str, text: str, style: str = "") -> Iterator[Line]:
    """A text under its name, all its lines."""
    yield (Word(f"  {name}", "dim"),)
    for line in visible(text).split("\n"):
        yield (Word(f"    {line}", style),)


def as_text(value: Any) -> str:
    """A prompt or a label: text as it is, chat messages by their roles, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "role" in item for item in value):
        return "\n".join(f"[{item['role']}] {as_text(item.get('content', ''))}" for item in value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


# ---- a transcript


class _Command(msgspec.Struct):
    """As the rollout process writes it (`rollout/samplers/transcript.py`)."""

    box: int = 1
    at: float = 0.0
    command: str = ""
    code: int | None = None
    seconds: float = 0.0
    limits: list[str] = []

    def __str__(self) -> str:
        """What came of it, in a line."""
        came = "no exit status" if self.code is None else f"exit {self.code}"
        limits = f", at its limit of {', '.join(self.limits)}" if self.limits else ""
        return f"{self.at:9.3f} s  box {self.box}  {came}{limits}, {span(self.seconds)}: {self.command}"


class _Transcript(msgspec.Struct):
    turns: list[tuple[int, int | str]] = []
    commands: list[_Command] = []
    left_out: int = 0


def parts(record: Record) -> list[tuple[str, str]]:
    """(POLICY, TOLD or SANDBOXES; its text) in order: every turn, then a line for every command."""
    try:
        found = msgspec.convert(record.transcript, _Transcript, strict=False)
    except msgspec.ValidationError:
        found = _Transcript()
    several = list(_turns(record, found.turns)) or [(POLICY, record.response)]
    lines = [str(command) for command in found.commands]
    if found.left_out:
        lines.insert(len(lines) // 2, f"... {found.left_out} commands are not kept ...")
    return [*several, (SANDBOXES, "\n".join(lines))] if lines else several


def _turns(record: Record, turns: list[tuple[int, int | str]]) -> Iterator[tuple[str, str]]:
    at = 0
    for own, what in turns:
        name = POLICY if own else TOLD
        if isinstance(what, str):
            yield name, what
        else:
            yield name, record.response[at : at + max(what, 0)]
            at += max(what, 0)


# ---- two


class Pair(NamedTuple):
    """The same response of the same prompt in both."""

    prompt: str
    before: Look
    after: Look

    @property
    def change(self) -> float:
        return self.after.record.reward - self.before.record.reward


def pairs(before: Iterable[Look], after: Iterable[Look]) -> list[Pair]:
    """What both have, joined by prompt and number of the response; the greatest change of reward first."""
    known: dict[tuple[str, int], Look] = {}
    for look in before:
        known.setdefault((as_text(look.record.prompt), look.record.index), look)
    found = []
    for look in after:
        key = as_text(look.record.prompt), look.record.index
        if (other := known.pop(key, None)) is not None:
            found.append(Pair(key[0], other, look))
    return sorted(found, key=lambda pair: (-abs(pair.change), pair.before.at))


def pair_lines(pair: Pair, names: tuple[str, str]) -> Iterator[Line]:
    """A prompt with both responses to it."""
    style = "green" if pair.change > 0 else "red" if pair.change < 0 else ""
    title = f"reward {pair.before.record.reward:.4g} -> {pair.after.record.reward:.4g}"
    yield (Word(title, f"bold {style}".strip()),)
    yield from field_lines("prompt", pair.prompt)
    for look, name in zip((pair.before, pair.after), names, strict=True):
        yield from head_lines(look.record, look.trained, f"  {name}: ")
        yield from field_lines("response", look.record.response, _reward_style(look.record))
    yield ()


def after_steps(done: int) -> str:
    """When an evaluation was made."""
    return "before the first step" if done == 0 else f"after {done} step{'s' if done > 1 else ''}"


def numbers(steps: Sequence[int]) -> str:
    """Ascending numbers in a few words: `0-15, 20`; the first and the last of those that are too many to list."""
    words = folded(steps).split(",")
    return ", ".join(words if len(words) <= LISTED else [*words[: LISTED // 2], "...", *words[-LISTED // 2 :]])


def summary_line(found: Sequence[Pair], names: tuple[str, str]) -> Line:
    """How many are better, worse and the same."""
    better = sum(pair.change > 0 for pair in found)
    worse = sum(pair.change < 0 for pair in found)
    before, after = (
        math.fsum(_number(look.record.reward) for look in looks) / max(len(found), 1)
        for looks in ([p.before for p in found], [p.after for p in found])
    )
    text = f"{len(found)} responses to the same prompts in {names[0]} and {names[1]}: "
    text += f"mean reward {before:.4g} -> {after:.4g}, "
    return (Word(f"{text}{better} better, {worse} worse, {len(found) - better - worse} the same", "bold"),)
