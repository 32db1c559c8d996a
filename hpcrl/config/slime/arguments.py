"""slime's and vime's arguments, verbatim -> options of hpcrl, with a line on what became of each flag.

    translate(["--hf-checkpoint", "/models/Qwen3-4B", "--sglang-mem-fraction-static", "0.7", ...])

`flags.toml` says what becomes of each flag.  Invariants: a flag has one verdict, and one that names an option of hpcrl
is true of the options that are declared now; no word is dropped without a line that says why; what cannot be honoured
is in one error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.passthrough import dashed
from hpcrl.config.rules.option_rules import build_options, check_options, inert
from hpcrl.config.setting_names import nearest, own
from hpcrl.config.slime.flag_reading import number
from hpcrl.config.slime.readers import READERS, FlagReading, Given, own_function
from hpcrl.config.stage_flags import split_name
from hpcrl.errors import UsageError
from hpcrl.utils.untrusted_files import read_given

ASYNC = "train_async.py"
REPEATED = {"rollout-sample-hook-path"}  #: flags that may be repeated: each counts
SAYS_NOTHING = "it only says what holds anyway"


@dataclass(frozen=True)
class Line:
    """What became of one flag.

    Attributes:
        flag: "" where slime's default was set.
        given: as written.
        options: the names that it set.
    """

    flag: str
    given: str
    reading: FlagReading
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The line, for a person."""
        arrow = f" -> {' '.join(self.reading.words)}" if self.reading.outcome == "translated" else ""
        why = f": {self.reading.why}" if self.reading.why else ""
        return f"{self.given}{arrow}{why}"


@dataclass(frozen=True)
class Translation:
    """What the arguments of another trainer mean here.

    Attributes:
        values: options by name, as a recipe has them.
        lines: one for each flag, in the order given.
        wrong: what cannot be honoured.
    """

    values: dict[str, Any]
    lines: tuple[Line, ...]
    wrong: tuple[UsageError, ...] = ()

    def with_outcome(self, *outcomes: str) -> list[Line]:
        """The lines of these outcomes."""
        return [line for line in self.lines if line.reading.outcome in outcomes]


@dataclass
class _Found:
    """What is being gathered."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    wrong: list[UsageError] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)  #: why -> the flags, as given
    reasons: dict[str, str] = field(
        default_factory=dict
    )  #: option, with its table before it -> the flag that set it, as given


def translate(words: Sequence[str], program: str = "train.py") -> Translation:
    """The arguments of train.py, or of train_async.py if `program` says so.

    Nothing is raised: `wrong` holds what cannot be honoured; rules that join options are checked where the recipe is
    resolved.
    """
    found = _Found()
    try:
        given = split_flags(words)
    except UsageError as error:
        return Translation({}, (), (error,))
    if program == ASYNC:
        _store_flag(ASYNC, {ASYNC: []}, found)
    for flag in given:
        _store_flag(flag, given, found)
    for flag, value in other_defaults().items():
        if flag not in given and own()[flag].field not in found.values:
            _set_default(flag, value, found)
    _drop_inert(found)
    refused = [UsageError(f"{', '.join(shown)}: {why}") for why, shown in found.refused.items()]
    return Translation(found.values, tuple(found.lines), (*refused, *found.wrong))


def split_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag, without dashes in front -> the words after it; of a flag given twice the later counts, as in argparse, but
    of REPEATED ones both."""
    given: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            flag = flag.replace("_", "-")
            before = given.pop(flag, [])
            given[flag] = [*(before if flag in REPEATED else ()), *([value] if equals else [])]
        elif flag:
            given[flag].append(word)
        else:
            raise UsageError(f"{word} does not follow a flag", "what follows -- are the arguments of train.py")
    return given


def _store_flag(flag: str, given: Given, found: _Found) -> None:
    """Store what one flag means, or what is wrong with it."""
    shown = " ".join([flag if flag == ASYNC else f"--{flag}", *given[flag]])
    reading = read_flag(flag, given)
    values: dict[str, Any] = {}
    if reading.words:
        try:
            values = _parsed(reading.words)
        except UsageError as error:
            reading = _refused(shown, reading, error)
    found.lines.append(Line(flag, shown, reading, tuple(_names(values))))
    if reading.outcome == "refused":
        found.refused.setdefault(reading.why, []).append(shown)
    _check_said(values, shown, found)
    for name, value in values.items():
        found.values[name] = {**found.values.get(name, {}), **value} if name in ("megatron", "vllm") else value


def _check_said(values: dict[str, Any], shown: str, found: _Found) -> None:
    """Two flags that set one option otherwise contradict each other; of one that is given twice the later counts."""
    for name in _names(values):
        head, _, key = name.partition(".")
        value, before = (table.get(head, {}).get(key) if key else table.get(head) for table in (values, found.values))
        # train_async.py is where the fully asynchronous function runs
        if name in found.reasons and found.reasons[name] != ASYNC and value != before:
            found.wrong.append(
                UsageError(f"{found.reasons[name]} and {shown} contradict each other", "leave one of them out")
            )
        found.reasons[name] = shown


def _refused(shown: str, reading: FlagReading, error: UsageError) -> FlagReading:
    why = "; ".join(filter(None, [error.what, error.hint]))
    return FlagReading("refused", (), why.removeprefix(shown).removeprefix(reading.words[0]).removeprefix(": ").strip())


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    values, _, rest = parse_flags(words)
    if any(split_name(name)[0] for name in values):
        raise UsageError(f"{words[0]} is an unknown option", "arguments of train.py have no stages")
    if rest:
        raise UsageError(f"{words[0]} does not accept these words: {' '.join(rest)}")
    return values


def _names(values: dict[str, Any]) -> Iterator[str]:
    """Options, those of a table with its name before them."""
    for name, value in values.items():
        if name in ("megatron", "vllm"):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def read_flag(flag: str, given: Given) -> FlagReading:
    """What one flag means here, by its verdict; without looking at whether its value is right."""
    verdict, words = verdicts().get(flag), given[flag]
    if verdict is None:
        return _unlisted(flag, words)
    if verdict.way == "option" or (verdict.way == "later" and flag in own()):
        foreign = flag.endswith("-path") and words and words[0].startswith(("slime.", "vime."))
        return own_function(flag, given) if foreign else FlagReading("kept", (f"--{flag}", *words))
    if verdict.way == "reader":
        return READERS[verdict.text](flag, given)
    if verdict.way == "is":
        return FlagReading("translated", (f"--{verdict.text}", *words))
    if verdict.way == "needless":
        return FlagReading("needless", (), verdict.text)
    if says_default(verdict, list(words)):
        return FlagReading("needless", (), SAYS_NOTHING)
    return FlagReading("refused", (), verdict.text)


def _unlisted(flag: str, words: Sequence[str]) -> FlagReading:
    """A flag that slime does not define itself: an option of hpcrl's, of Megatron's or of vLLM's, or unknown."""
    if flag.startswith("sglang-") and flag not in own():
        name = flag.removeprefix("sglang-")
        close = nearest(f"vllm-{name}", [verdict.text for verdict in verdicts().values() if verdict.way == "is"])
        hint = f"; did you mean --{close}?" if close else ""
        return FlagReading("refused", (), f"the engines run vLLM: its settings are --vllm-...{hint}")
    return FlagReading("kept", (f"--{flag}", *words))


def _set_default(flag: str, value: str, found: _Found) -> None:
    option = own()[flag].field
    mine = Options.model_fields[option].get_default(call_default_factory=True)
    why = f"slime's default, set because hpcrl's is {mine}"
    found.values |= _parsed([f"--{flag}", value])
    found.lines.append(Line("", f"--{flag} {value}", FlagReading("kept", (f"--{flag}", value), why), (option,)))


def _drop_inert(found: _Found) -> None:
    """Leave out what has no effect in this combination: slime takes such flags, so that they pass, with a line that
    says why."""
    while True:
        try:
            options = build_options(found.values)
        except UsageError:
            return
        defaults = {name: info.get_default(call_default_factory=True) for name, info in Options.model_fields.items()}
        without = {name: why for name, why in _inert(options).items() if name in found.values}
        wrong = _broken(options)  # what contradicts something else is not a flag without effect
        changed = [name for name in without if found.values[name] != defaults[name]]
        dropped = {name: without[name] for name in changed if f"--{dashed(name)} " not in f"{wrong} "}
        if not dropped:
            return
        for name in dropped:
            del found.values[name]
        found.lines[:] = [
            _without(line, dropped) for line in found.lines if line.flag or not set(line.options) & set(dropped)
        ]


def _inert(options: Options) -> dict[str, str]:
    try:
        return inert(options)
    except ZeroDivisionError:  # a layout that does not divide: the rules will say so
        return {}


def _broken(options: Options) -> str:
    """What the rules that join options say against these."""
    try:
        check_options(options, [])
    except UsageError as error:
        return str(error)
    return ""


def _without(line: Line, dropped: dict[str, str]) -> Line:
    heads = [name.partition(".")[0] for name in line.options]
    why = next((dropped[head] for head in heads if head in dropped), None)
    return line if why is None else replace(line, reading=FlagReading("needless", (), f"no effect: {why}"), options=())


# ---- flag table

TransportModule = Literal["option", "later", "is", "reader", "needless", "refused"]
TABLE = Path(__file__).with_name("flags.toml")
DEFAULTS = "defaults"  #: the section of flags.toml that holds values, not verdicts


@dataclass(frozen=True)
class FlagVerdict:
    """What becomes of a flag.

    Attributes:
        text: the reason (later, needless, refused), the flag that says the same here (is), or a function of readers.py
            (reader).
        default: slime's default, of a flag that says nothing when it is given with it; None: there is no such value.
    """

    way: TransportModule
    text: str = ""
    default: Any = None


@cache
def verdicts() -> dict[str, FlagVerdict]:
    """Flag, without dashes in front -> its verdict."""
    found: dict[str, FlagVerdict] = {}
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
    """Flags whose default in slime trains otherwise, or waits longer, than hpcrl's -> slime's, as a word."""
    return dict(_document()[DEFAULTS])


@cache
def _document() -> dict[str, dict[str, Any]]:
    return tomllib.loads(read_given(TABLE))


def _verdict(flag: str, said: Any) -> FlagVerdict:
    if said == "option":
        return FlagVerdict("option")
    ways = [way for way in get_args(TransportModule) if way in said]
    if len(ways) != 1 or not isinstance(said[ways[0]], str) or said.keys() - {ways[0], "default"}:
        raise ValueError(f"{TABLE}: {flag} = {said}")
    return FlagVerdict(ways[0], said[ways[0]], said.get("default"))


def says_default(verdict: FlagVerdict, values: list[str]) -> bool:
    """Whether the words after a flag only repeat slime's default."""
    default = verdict.default
    if default is None or isinstance(default, bool):
        return bool(default) and not values
    return len(values) == 1 and default in (values[0], number(values[0]))
