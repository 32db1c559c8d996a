"""How the value of an option is written: on a command line as words, in TOML or JSON as a value.

Invariant: a value that `parse` returns or `fits` accepts has the declared type; nothing is guessed from its spelling
unless the declaration itself leaves the type open.
"""

from __future__ import annotations

import json
import operator
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Base = Literal["bool", "int", "float", "str", "object", "any", "none"]


class _Words(NamedTuple):
    """How one value of a base is called, several are, the value in --help, and what it is in Python."""

    one: str
    several: str
    metavar: str
    types: tuple[type, ...]


_BASES: dict[Base, _Words] = {
    "bool": _Words("true or false", "true or false", "", (bool,)),
    "int": _Words("a whole number", "whole numbers", "INT", (int,)),
    "float": _Words("a number", "numbers", "FLOAT", (int, float)),
    "str": _Words("text", "words", "TEXT", (str,)),
    "object": _Words("a JSON object", "JSON objects", "JSON", (dict,)),
    "any": _Words("a value", "values", "VALUE", (bool, int, float, str, list, dict)),
    "none": _Words("nothing that can be written", "nothing that can be written", "", ()),
}
_PLAIN: dict[Any, Base] = {bool: "bool", int: "int", float: "float", str: "str", dict: "object", type: "none"}

_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Kind:
    """The type of an option's value.

    Attributes:
        base: "object" is a JSON object, "any" is left open, "none" cannot be written at all (functions, tensors' dtypes
            ...).
        many: a list of it.
        lone: one that may also be written without the list.
        choices: the only values allowed.
        optional: null is allowed.
        bounds: as text, such as ">= 1".
        bare: the flag may be without a value and then means true (only where nothing is known of the type).
    """

    base: Base
    many: bool = False
    lone: bool = False
    choices: tuple[str | int, ...] = ()
    optional: bool = False
    bounds: str = ""
    bare: bool = False

    @property
    def takes_words(self) -> tuple[int, int | None]:
        """The least and the greatest number of words after the flag (None: no limit)."""
        if self.base == "bool" and not self.many:
            return 0, 0
        if self.base == "any":
            return 0 if self.bare else 1, None
        return 1, None if self.many else 1

    def parse(self, words: Sequence[str]) -> Any:
        """The value that words of a command line stand for.

        Raises:
            ValueError: if they do not fit.
        """
        low, high = self.takes_words
        if len(words) < low or (high is not None and len(words) > high):
            raise ValueError(words)
        if self.base == "any":
            values = [_open(word) for word in words]
            return True if not values else values[0] if len(values) == 1 else values
        if not words:
            return True
        values = [self._one(word) for word in words]
        value = values if self.many and not (self.lone and len(values) == 1) else values[0]
        if not self.fits(value):
            raise ValueError(words)
        return value

    def inside(self, value: Any) -> bool:
        """Whether a number is within the bounds; true of all else."""
        if not self.bounds or isinstance(value, bool) or not isinstance(value, int | float):
            return True
        parts = [part.split() for part in self.bounds.split(" and ")]
        return all(_COMPARED[sign](value, float(bound)) for sign, bound in parts)

    def _one(self, word: str) -> Any:
        if self.base == "int":
            return int(word)
        if self.base == "float":
            return float(word)
        if self.base == "object":
            return read_json_word(word)
        if self.base == "bool":
            return {"true": True, "false": False}[word.lower()] if word.lower() in ("true", "false") else word
        return word

    def fits(self, value: Any) -> bool:
        """Whether a value of TOML or JSON has this type (bounds are checked by the declaration's owner)."""
        if value is None:
            return self.optional
        if self.many and not (self.lone and not isinstance(value, list)):
            return isinstance(value, list) and all(
                replace(self, many=False, optional=False).fits(item) for item in value
            )
        if self.choices and value not in self.choices:
            return False
        if isinstance(value, int) and not -LARGEST <= value < LARGEST:
            return False
        return isinstance(value, _BASES[self.base].types) and (
            self.base in ("bool", "any") or not isinstance(value, bool)
        )

    @property
    def metavar(self) -> str:
        """How --help writes the value."""
        one = "{" + ",".join(map(str, self.choices)) + "}" if self.choices else _BASES[self.base].metavar
        return f"{one} [{one} ...]" if self.many else one

    def __str__(self) -> str:
        """What is expected, for an error: "a whole number >= 1"."""
        if self.choices:
            return ("a list out of " if self.many else "one of ") + ", ".join(map(str, self.choices))
        words = _BASES[self.base]
        noun = words.several if self.many else words.one
        return f"{noun} {self.bounds}".rstrip()


LARGEST = 1 << 63  #: whole numbers are less, as torch's and msgpack's are


def _open(word: str) -> Any:
    """A word whose type is not declared: a number, true, false or JSON if it reads as one, else text."""
    if re.match(r'[-\d\[{"]|true$|false$', word):
        try:
            return read_json_word(word)
        except ValueError:
            pass
    return word


def union(kinds: Iterable[Kind]) -> Kind:
    """The kind of `A | B`: what both share, or else left open."""
    parts = list(dict.fromkeys(kinds))
    if len(parts) == 1:
        return parts[0]
    if not parts or len({part.many for part in parts}) > 1:
        return Kind("any")
    bases = {part.base for part in parts}
    choices = tuple(c for part in parts for c in part.choices) if all(part.choices for part in parts) else ()
    if len(bases) == 1:
        return replace(parts[0], choices=choices)
    return Kind("float", parts[0].many) if bases == {"int", "float"} else Kind("any")


def kind_of(annotation: Any) -> Kind:
    """The kind of a Python type annotation; "any" for a type that has no kind."""
    origin = typing.get_origin(annotation) or annotation
    args = [a for a in typing.get_args(annotation) if a is not Ellipsis]
    if origin in (types.UnionType, typing.Union):
        parts = [kind for a in args if a is not type(None) and (kind := kind_of(a)).base != "none"]
        if len(parts) == 2 and parts[1] == replace(parts[0], many=True):
            return replace(parts[1], lone=True, optional=type(None) in args)
        return replace(union(parts) if parts else Kind("none"), optional=type(None) in args)
    if origin is Literal:
        return Kind("int" if all(isinstance(a, int) for a in args) else "str", choices=tuple(args))
    if origin is list:
        one = union(kind_of(a) for a in args)
        return Kind("any") if one.many or one.base in ("any", "none") else replace(one, many=True)
    return Kind(_PLAIN.get(origin, "any"))


def read_json_word(word: str) -> Any:
    """A word as JSON; ValueError if it is not JSON, or is nested too deep."""
    try:
        return json.loads(word)
    except RecursionError:
        raise ValueError("nested too deep") from None
