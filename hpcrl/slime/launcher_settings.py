"""Settings of a launcher in Python, which NAME=VALUE after it sets: the fields of a dataclass, the parameters of a
function, or the flags of argparse.

Invariant: standard library alone, as `launcher.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any


def field_value(text: str, kind: Any) -> Any:
    """A word of the command line as a field's type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next((part for part in typing.get_args(kind) if part is not type(None)), str)
    if kind is bool:
        return text.lower() in ("1", "true", "yes")
    return kind(text) if kind in (int, float) else text


def settings(cls: type) -> Any:
    """A dataclass with its defaults, and with what NAME=VALUE after the script says."""
    hints = typing.get_type_hints(cls)
    given = {}
    for field in dataclasses.fields(cls):
        if field.name in os.environ:
            given[field.name] = field_value(os.environ[field.name], hints.get(field.name, str))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            sys.exit(f"line 0: {field.name}: has no default")
    return cls(**given)


def call(function: Callable[..., Any]) -> Any:
    """Call a launcher's main function as its command line would without a word."""
    if getattr(function, "called_alone", False):
        return function()
    hints = typing.get_type_hints(function)
    given = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints.get(name, str)
        if dataclasses.is_dataclass(kind):
            given[name] = settings(kind)  # type: ignore[arg-type]
        elif name in os.environ:
            given[name] = field_value(os.environ[name], kind)
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            sys.exit(f"line 0: {name}: has no default")
    return function(**given)


def dataclass_cli(function: Any = None, **_: Any) -> Any:
    """slime's decorator: a function of one dataclass becomes a command."""
    if function is None:
        return dataclass_cli

    def command(*given: Any, **named: Any) -> Any:
        return function(*given, **named) if given or named else call(function)

    command.called_alone = True  # type: ignore[attr-defined]
    return command


class Typer:
    """typer's: the first command is what is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._commands: list[Callable[..., Any]] = []

    def command(self, *_: Any, **__: Any) -> Callable[[Any], Any]:
        """The decorator."""
        return lambda function: self._commands.append(function) or function

    callback = command

    def __call__(self) -> None:
        if self._commands:
            call(self._commands[0])


def default_of(default: Any = None, *_: Any, **__: Any) -> Any:
    """typer's Option and Argument: the default."""
    return default


def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> argparse.Namespace:
    """argparse's, with what NAME=VALUE after the script says as if it had been written as flags."""
    words = []
    for action in parser._actions:
        if args is None and action.dest in os.environ.get("HPCRL_GIVEN", "").split():
            value = [] if action.nargs == 0 else os.environ[action.dest].split()
            words += [*action.option_strings[-1:], *value]
    known, rest = parser.parse_known_args(words if args is None else args, namespace)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return known


def read_settings() -> None:
    """Have argparse read NAME=VALUE."""
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment,method-assign]
