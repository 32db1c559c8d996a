"""Every name that a flag or a key of a recipe may have, and where it leads.

Invariant: a name that leads nowhere is an error that says which known name is nearest; hpcrl's own names come before
Megatron's, so no setting can be reached in two places.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from hpcrl.config import passthrough
from hpcrl.config.options import SECTIONS, Options
from hpcrl.config.passthrough import Target, dashed
from hpcrl.config.value_types import Kind, kind_of
from hpcrl.errors import UsageError

_BOUNDS = {
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "<="),
    annotated_types.Lt: ("lt", "<"),
}
_SURE = 0.8  #: how alike a misspelt own flag must be, to be told from one of a package that is not installed here


def kind_of_field(field: FieldInfo) -> Kind:
    """The kind of one of hpcrl's own options, with its bounds."""
    bounds = [(sign, getattr(m, attr)) for m in field.metadata for cls, (attr, sign) in _BOUNDS.items() if isinstance(m, cls)]
    return replace(kind_of(field.annotation), bounds=" and ".join(f"{sign} {value:g}" for sign, value in bounds))


def sections() -> Iterator[tuple[str, list[str]]]:
    """(title, option names) of every section, in the order of options.py; together they hold every option once."""
    shown: set[str] = set()
    for section in SECTIONS:
        names = list(section.__annotations__)
        shown |= {*names}
        yield section.__doc__ or section.__name__, names
    yield "name, and what passes through", [name for name in Options.model_fields if name not in shown]


@cache
def own() -> dict[str, Target]:
    """hpcrl's own flags, without the leading dashes: --x for every option, and --no-x for a switch."""
    found: dict[str, Target] = {}
    for name in (name for _, names in sections() for name in names):
        kind, flag = kind_of_field(Options.model_fields[name]), dashed(name)
        switch = kind.base == "bool"
        found[flag] = Target("", name, kind, True if switch else None)
        if switch:
            found[f"no-{flag}"] = Target("", name, kind, False)
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, if any is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _foreign(*tables: passthrough.Table) -> list[str]:
    """Flags of these packages that may be given: those that an error may propose."""
    return [
        flag for table in tables for flag, to in passthrough.spellings(table).items() if to.field not in passthrough.OWNED[table]
    ]


def find_flag(flag: str, extra: Iterable[str] = ()) -> Target:
    """Where `--flag` leads.  UsageError names the nearest of all known flags (and of `extra`, the command's own)."""
    if target := own().get(flag):
        return target
    table: passthrough.Table = "vllm" if flag.startswith("vllm-") else "megatron"
    mine = [*own(), *extra]
    if passthrough.settings(table) is None and table == "megatron" and difflib.get_close_matches(flag, mine, n=1, cutoff=_SURE):
        raise _unknown(f"--{flag}", nearest(flag, mine), "--")
    if target := passthrough.find_setting(table, flag, f"--{flag}"):
        return target
    raise _unknown(f"--{flag}", nearest(flag, [*mine, *_foreign("megatron", "vllm")]), "--")


def find_key(key: str, where: str, extra: Iterable[str] = ()) -> Target:
    """Where a key at the top of a recipe, or of a stage, leads; keys are spelled with underscores.

    UsageError names the place `where` and the nearest known key.
    """
    flag = dashed(key)
    keys = {f: t for f, t in own().items() if t.fixed is not False}  # off is `x = false`, not a name of its own
    if flag in keys and "-" not in key:
        return keys[flag]
    if "-" not in key and flag not in own():
        table: passthrough.Table = "vllm" if flag.startswith("vllm-") else "megatron"
        certain = passthrough.settings(table) is not None or not difflib.get_close_matches(
            flag, [*keys, *extra], n=1, cutoff=_SURE
        )
        if certain and (target := passthrough.find_setting(table, flag, f"{where}: {key}")):
            return target
    known = [*keys, *extra, *_foreign("megatron", "vllm")]
    found = nearest(flag, known)
    raise _unknown(f"{where}: {key}", found.replace("-", "_") if found else None, "")


def find_in(table: passthrough.Table, key: str, where: str) -> Target:
    """Where a key inside [megatron] or [vllm] leads: a field's name, or Megatron's flag spelled with underscores."""
    shown, flag = f"{where}: {key}", ("vllm-" if table == "vllm" else "") + dashed(key)
    if table == "megatron" and (mine := own().get(flag)):
        raise UsageError(f"{shown} is an option of hpcrl's own", f"write {mine.field} outside the table")
    if "-" not in key and (target := passthrough.find_setting(table, flag, shown)):
        return target
    found = nearest(flag, _foreign(table))
    raise _unknown(shown, found.removeprefix("vllm-").replace("-", "_") if found else None, "")


def _unknown(shown: str, found: str | None, prefix: str) -> UsageError:
    hint = f"did you mean {prefix}{found}?" if found else "see hpcrl run --help"
    return UsageError(f"{shown} is an unknown option", hint)


def settle_value(target: Target, value: Any, shown: str) -> Any:
    """The value to store for `target` when a file says `value`; UsageError if it is of another type."""
    if not target.kind.fits(value):
        raise UsageError(f"{shown} = {spell(value)}: expected {target.kind}")
    if not target.table or target.fixed is None:
        return value
    if value is False and not isinstance(target.fixed, bool):
        raise UsageError(f"{shown} = false: expected true", "leave it out")
    return target.fixed if value else not target.fixed


def spell(value: Any) -> str:
    """A value as a person writes it in a recipe (an object as JSON)."""
    return json.dumps(value, default=str, ensure_ascii=False)


def gather(values: Mapping[str, Any], where: str, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Keys and values of a file -> own options by name, and the tables "megatron" and "vllm" by field; all checked.

    Bounds, and what options say together, are left to `resolve`.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("megatron", "vllm"):
            if not isinstance(value, dict):
                raise UsageError(f"{where}: {key} = {spell(value)}: expected a table")
            for inner, item in value.items():
                put(found, find_in(key, inner, f"{where}: [{key}]"), item, f"{where}: [{key}] {inner}")
        else:
            put(found, find_key(key, where, extra), value, f"{where}: {key}")
    return found


def put(found: dict[str, Any], target: Target, value: Any, shown: str) -> None:
    """Store a file's value where it belongs."""
    place = found.setdefault(target.table, {}) if target.table else found
    place[target.field] = settle_value(target, value, shown)
