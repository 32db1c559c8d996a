"""A recipe with the shape of a row: its text, in which only the keys that change are changed.

    text = with_settings(text, {"tensor_model_parallel_size": 4, "vllm": {"data_parallel_size": 8}})

Invariants: a pure function of the text; comments, order and every other value stay; what it gives is a recipe whose
values are the old ones with these settings, else it raises.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.fit.shapes import KEYS
from hpcrl.untrusted_files import parse_toml

#: a setting of a plain value, in one line: before the value, the value, after it
_LINE = re.compile(r"(\s*([A-Za-z0-9_]+)\s*=\s*)(true|false|[+-]?\d[\d_]*)(\s*(?:#.*)?)")
_HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(?:#.*)?")
STAGE = "stage"  #: whose values go before those at the top


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """The text of a recipe of one stage with these options.

    Args:
        settings: whole numbers and switches by name; a table of such under "vllm".

    Raises:
        UsageError: for a recipe that holds one of them in a form that cannot be changed in place.
    """
    before = parse_toml(text)
    lines = text.splitlines(keepends=True)
    for name, value in settings.items():
        if isinstance(value, Mapping):
            for key, item in value.items():
                lines = _put(lines, name, key, item, before.get(name, {}).get(key))
        else:
            staged = any(name in stage for stage in before.get(STAGE, ()))
            lines = _put(lines, STAGE if staged else "", name, value, _said(before, name))
    made = "".join(lines)
    try:
        right = parse_toml(made) == _wanted(before, settings)
    except ValueError:
        right = False
    if not right:
        raise UsageError(
            "the recipe sets its shape in a way that is not rewritten", "write each key in a line of its own"
        )
    return made


def _said(document: Mapping[str, Any], name: str) -> Any:
    """What the recipe says of an option; None for nothing."""
    for place in (*document.get(STAGE, ()), document):
        if name in place:
            return place[name]
    return None


def _wanted(before: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's values with the settings, where `_put` puts them."""
    made = copy.deepcopy(dict(before))
    for name, value in settings.items():
        if isinstance(value, Mapping):
            made.setdefault(name, {}).update(value)
            continue
        if _said(before, name) is None and value == _default(name):
            continue
        place = next((stage for stage in made.get(STAGE, ()) if name in stage), made)
        place[name] = value
    return made


def _default(name: str) -> Any:
    from hpcrl.config.options import Options

    return Options.model_fields[name].get_default(call_default_factory=True)


def _put(lines: list[str], place: str, name: str, value: Any, said: Any) -> list[str]:
    """The lines with one setting.

    Args:
        place: the table in which it is or comes, "" for the top.
        said: its value so far, None for none.
    """
    shown = str(value).lower()
    if said == value or (said is None and not place and value == _default(name)):
        return lines
    section = ""
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line.rstrip("\n")):
            section = header[1]
        found = _LINE.fullmatch(line.rstrip("\n"))
        if found and found[2] == name and section == place:
            new = f"{found[1]}{shown}{found[4]}" + ("\n" if line.endswith("\n") else "")
            return [*lines[:number], new, *lines[number + 1 :]]
    return _insert(lines, place, f"{name} = {shown}\n")


def _insert(lines: list[str], place: str, new: str) -> list[str]:
    """The lines with a new one: at the top after the last key of a shape, in a table right after its header."""
    section, after, first = "", None, len(lines)
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line.rstrip("\n")):
            section, first = header[1], min(first, number)
            if place and section == place:
                after = number + 1
        found = _LINE.fullmatch(line.rstrip("\n"))
        if not place and not section and found and found[2] in KEYS:
            after = number + 1
    if after is None:
        if place:
            return [*_ended(lines), f"\n[{place}]\n", new]
        after = first
    return [*_ended(lines[:after]), new, *lines[after:]]


def _ended(lines: list[str]) -> list[str]:
    """The lines, the last of them with its end."""
    return [*lines[:-1], lines[-1] if lines[-1].endswith("\n") else f"{lines[-1]}\n"] if lines else []
