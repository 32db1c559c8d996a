"""Settings of a launcher in Python, which NAME=VALUE after it sets: the fields of a dataclass, the parameters of a
function, or the flags of argparse.

Invariant: standard library alone, as `launcher.py`; a value has the type that its setting has, or ends the script; what
was read, and what could have been, is noted down.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import enum
import inspect
import json
import os
import pathlib
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from hpcrl.config.slime.launcher_values import note

READ = "hpcrl-read"  #: a call of this name holds a NAME=VALUE that the launcher has read
OFFERED = "hpcrl-offered"  #: a name of a setting that it has
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
MODELS = 'source "scripts/models/'  #: how slime has bash read the arguments of a model
_read: set[str] = set()


def names_given() -> list[str]:
    """The names of NAME=VALUE."""
    return dict.get(plain_environment(), "HPCRL_GIVEN", "").split()


def plain_environment() -> dict[str, str]:
    """The environment's variables, without noting down that they are read."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in os.environ._data.items()}  # type: ignore[attr-defined]


def mark_read(*names: str) -> None:
    """Note down which NAME=VALUE is read."""
    if new := [name for name in names if name in names_given() and name not in _read]:
        _read.update(new)
        note(READ, *new)


def mark_read_by(command: str) -> None:
    """Note down which NAME=VALUE a command may read: all, if it is a script of bash's; slime's files of model arguments
    read some of their own."""
    script = re.search(
        r"(^|[\s;&|(/])(bash|sh|source|env|printenv)\s|\.sh(?!\w)", re.sub(rf"{MODELS}[^\"]*", "", command)
    )
    model = MODELS in command
    mark_read(*(n for n in names_given() if script or n in command or (model and n.startswith("MODEL_ARGS_"))))


class Environment(os._Environ):  # type: ignore[type-arg]
    """os.environ, which notes down what is read of it."""

    def __getitem__(self, name: str) -> str:
        mark_read(name)
        return super().__getitem__(name)


def given(name: str) -> str | None:
    """What NAME=VALUE says of a setting."""
    note(OFFERED, name)
    if name not in names_given():
        return None
    mark_read(name)
    return plain_environment().get(name)


def wrong(name: str, text: str, why: str) -> typing.NoReturn:
    """End the script over a value."""
    sys.exit(f"{name}={text}: {why}")


def truth(name: str, text: str) -> bool:
    """A word as true or false."""
    if text.lower() not in TRUTH:
        wrong(name, text, "is neither true nor false")
    return TRUTH[text.lower()]


def field_value(name: str, text: str, kind: Any) -> Any:
    """A word of the command line as a setting's type."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in parts and text.lower() in ("none", "null"):
            return None
        return field_value(name, text, next((part for part in parts if part is not type(None)), str))
    if origin is typing.Literal:
        known = {str(part): part for part in parts}
        return known[text] if text in known else wrong(name, text, f"is none of {', '.join(known)}")
    if origin in LISTS or kind in LISTS:
        return list_value(name, text, origin or kind, parts)
    if kind is bool:
        return truth(name, text)
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        known = {**kind.__members__, **{str(part.value): part for part in kind}}
        return known[text] if text in known else wrong(name, text, f"is none of {', '.join(kind.__members__)}")
    try:
        if origin is dict or kind is dict:
            return json.loads(text)
        return kind(text) if kind in (int, float, pathlib.Path) else text
    except ValueError:
        return wrong(name, text, f"is no {getattr(origin or kind, '__name__', kind)}")


def list_value(name: str, text: str, origin: Any, parts: tuple[Any, ...]) -> Any:
    """JSON, or words with commas between them, as a list, a tuple or a set."""
    try:
        words = json.loads(text) if text.startswith("[") else [word.strip() for word in text.split(",") if word.strip()]
    except ValueError:
        wrong(name, text, "is no JSON")
    kinds = parts if origin is tuple and parts[-1:] != (...,) else (parts[:1] or (str,)) * len(words)
    if len(kinds) != len(words) and kinds:
        wrong(name, text, f"has {len(words)} values, not {len(kinds)}")
    values = [field_value(name, str(word), kind) for word, kind in zip(words, kinds or [str] * len(words), strict=True)]
    return origin(values) if origin in (tuple, set, frozenset) else values


def settings(cls: type) -> Any:
    """A dataclass with its defaults, and with what NAME=VALUE after the script says."""
    hints = typing.get_type_hints(cls)
    values = {}
    for field in filter(lambda field: field.init, dataclasses.fields(cls)):
        text = given(field.name)
        if text is not None:
            values[field.name] = field_value(field.name, text, hints.get(field.name, str))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(kind := hints.get(field.name, str)):
                sys.exit(f"line 0: {field.name}: has no default")
            values[field.name] = settings(kind)  # type: ignore[arg-type]
    return cls(**values)


def call(function: Callable[..., Any]) -> Any:
    """Call a launcher's main function as its command line would without a word."""
    if getattr(function, "called_alone", False):
        return function()
    hints = typing.get_type_hints(function)
    values = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        kind = hints.get(name, str if default in (None, parameter.empty) else type(default))
        if dataclasses.is_dataclass(kind):
            values[name] = settings(kind)  # type: ignore[arg-type]
        elif (text := given(name)) is not None:
            values[name] = field_value(name, text, kind)
        elif default is parameter.empty:
            sys.exit(f"line 0: {name}: has no default")
    return function(**values)


def dataclass_cli(function: Any = None, **_: Any) -> Any:
    """slime's decorator: a function of one dataclass becomes a command."""
    if function is None:
        return dataclass_cli

    def command(*given: Any, **named: Any) -> Any:
        return function(*given, **named) if given or named else call(function)

    command.called_alone = True  # type: ignore[attr-defined]
    return command


class Typer:
    """typer's: its callback is called, then its command; which one of several, command=NAME says."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._commands: dict[str, Callable[..., Any]] = {}
        self._first: list[Callable[..., Any]] = []

    def command(self, name: str | None = None, *_: Any, **__: Any) -> Callable[[Any], Any]:
        """The decorator of a command, which is called as its function is unless it has a name."""

        def named(function: Any) -> Any:
            self._commands[name or getattr(function, "__name__", "").replace("_", "-")] = function
            return function

        return named

    def callback(self, *_: Any, **__: Any) -> Callable[[Any], Any]:
        """The decorator of what comes before each command."""
        return lambda function: self._first.append(function) or function

    def __call__(self, *_: Any, **__: Any) -> None:
        chosen = self._chosen()
        for function in filter(None, (*self._first, chosen)):
            call(function)

    def _chosen(self) -> Callable[..., Any] | None:
        if len(self._commands) < 2:
            return next(iter(self._commands.values()), None)
        text = given("command")
        if text is None:
            sys.exit(f"line 0: command: is one of {', '.join(self._commands)}")
        found = self._commands.get(text, self._commands.get(text.replace("_", "-")))
        return found or wrong("command", text, f"is none of {', '.join(self._commands)}")


def default_of(default: Any = ..., *_: Any, default_factory: Callable[[], Any] | None = None, **__: Any) -> Any:
    """typer's Option and Argument: the default; without one, or with an ellipsis, it must be given."""
    if default_factory is not None:
        return default_factory()
    return inspect.Parameter.empty if default is ... else default


# ---- argparse

_parse_known_args = argparse.ArgumentParser.parse_known_args


def parse_known_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
    """argparse's, with what NAME=VALUE after the script says as if it had been written as flags."""
    words = list(args) if args else [*given_flags(parser), *given_positionals(parser)]
    return _parse_known_args(parser, words, namespace)


def given_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags that NAME=VALUE stands for; one of several with one name is what says the value."""
    flags: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            flags.setdefault(action.dest, []).append(action)
    for name, actions in flags.items():
        text = given(name)
        if text is None:
            continue
        found = next((words for action in actions if (words := flag_words(action, text)) is not None), None)
        if found is None and str(actions[0].default).lower() != str(TRUTH.get(text.lower(), text)).lower():
            wrong(name, text, f"no flag of it says so: {', '.join(actions[0].option_strings)}")
        yield from found or ()


def flag_words(action: argparse.Action, text: str) -> list[str] | None:
    """One flag with its value; None if it cannot say that."""
    option = next((one for one in action.option_strings if one.startswith("--")), action.option_strings[0])
    if isinstance(action, argparse.BooleanOptionalAction):
        wanted = truth(action.dest, text)
        said = [one for one in action.option_strings if one.startswith("--no-") is not wanted]
        return said[:1] or None
    if action.nargs == 0:
        value = truth(action.dest, text) if isinstance(action.const, bool) else text
        if isinstance(action, argparse._CountAction):
            return [option] * field_value(action.dest, text, int)
        return [option] if value == (action.const if isinstance(action.const, bool) else str(action.const)) else None
    if action.nargs is not None and action.nargs != "?":
        return [option, *shlex.split(text)]
    return [f"{option}={text}"] if option.startswith("--") else [option, text]


def given_positionals(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The words without a flag, of which none may be left out before one that is given."""
    words: list[str] = []
    missing = ""
    for action in parser._actions:
        if action.option_strings:
            continue
        text = given(action.dest)
        if text is None:
            missing = missing or action.dest
            continue
        if missing:
            wrong(action.dest, text, f"give {missing} as well, which comes before it")
        words += [text] if action.nargs in (None, "?") else shlex.split(text)
    subcommands = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    yield from ["--", *words] if words and not subcommands else words


def read_settings() -> None:
    """Have argparse read NAME=VALUE, and os.environ note down which was read."""
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
    os.environ.__class__ = Environment
