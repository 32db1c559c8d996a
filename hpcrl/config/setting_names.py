"""Every name that a flag or a key of a recipe may have, where it leads, and the known name next to an unknown one.

Invariants: a name that leads nowhere is an error; hpcrl's own names come before Megatron's, so no setting can be
reached in two places.  A hint names only what exists, and none is given where nothing is similar enough: a wrong one
costs more than none.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from hpcrl.config import passthrough
from hpcrl.config.options import SECTIONS, Options
from hpcrl.config.passthrough import Target, dashed
from hpcrl.config.value_types import Kind, kind_of
from hpcrl.errors import UsageError, raise_together

_BOUNDS = {
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "<="),
    annotated_types.Lt: ("lt", "<"),
}


def kind_of_field(field: FieldInfo) -> Kind:
    """The kind of one of hpcrl's own options, with its bounds."""
    bounds = [
        (sign, getattr(m, attr)) for m in field.metadata for cls, (attr, sign) in _BOUNDS.items() if isinstance(m, cls)
    ]
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
        kind = kind_of_field(Options.model_fields[name])
        flag = dashed(name)
        switch = kind.base == "bool"
        found[flag] = Target("", name, kind, True if switch else None)
        if switch:
            found[f"no-{flag}"] = Target("", name, kind, False)
    return found


def _foreign(*tables: passthrough.Table) -> list[str]:
    """Flags of these packages that may be given: those that an error may propose."""
    return [
        flag
        for table in tables
        for flag, to in passthrough.spellings(table).items()
        if to.field not in passthrough.OWNED[table]
    ]


def find_flag(flag: str, extra: Iterable[str] = (), stage: str = "") -> Target:
    """Where `--flag` leads, or `--STAGE.flag`.

    Raises:
        UsageError: says what may have been meant: one of all known flags (and of `extra`, the command's own).
    """
    dashes = f"--{stage}." if stage else "--"
    mine = [*own(), *extra]
    if target := own().get(flag) or _passed_through(flag, mine, f"{dashes}{flag}"):
        return target
    raise UsageError(
        f"{dashes}{flag} is an unknown option",
        advice(flag, [*mine, *_foreign("megatron", "vllm")], lambda name: f"{dashes}{name}"),
    )


def find_key(key: str, where: str, extra: Iterable[str] = ()) -> Target:
    """Where a key at the top of a recipe, or of a stage, leads; keys are spelled with underscores.

    Raises:
        UsageError: names the place `where` and what may have been meant.
    """
    flag = dashed(key)
    keys = {f: t for f, t in own().items() if t.fixed is not False}  # off is `x = false`, not another name
    mine = [*keys, *extra]
    unknown = f"{where}: {key} is an unknown option"
    if "-" not in key:
        if flag in own() and flag not in keys:
            raise UsageError(unknown, f"write {key.removeprefix('no_')} = false")
        if target := keys.get(flag) or _passed_through(flag, mine, f"{where}: {key}"):
            return target
    raise UsageError(unknown, advice(flag, [*mine, *_foreign("megatron", "vllm")], _as_key))


def find_in(table: passthrough.Table, key: str, where: str) -> Target:
    """Where a key inside [megatron] or [vllm] leads: a field's name, or Megatron's flag spelled with underscores."""
    shown = f"{where}: {key}"
    flag = ("vllm-" if table == "vllm" else "") + dashed(key)
    if table == "megatron" and (mine := own().get(flag)):
        raise UsageError(f"{shown} is an option of hpcrl's own", f"write {mine.field} outside the table")
    if "-" not in key and (target := passthrough.find_setting(table, flag, shown)):
        return target
    hint = advice(flag, _foreign(table), lambda name: _as_key(name.removeprefix("vllm-")))
    raise UsageError(f"{shown} is an unknown option", hint)


def _as_key(flag: str) -> str:
    return flag.replace("-", "_")


#: names of Megatron's whose words are all in a name of ours, so that they would be taken for slips of it
ALSO_MEGATRON = ("num-layers", "q-lora-rank", "kv-lora-rank")


def _passed_through(flag: str, mine: Collection[str], shown: str) -> Target | None:
    """The setting of vLLM's or Megatron's that a flag leads to.

    Where Megatron is not installed, any name may be one of its own: a slip of one of ours is taken for that.
    """
    table: passthrough.Table = "vllm" if flag.startswith("vllm-") else "megatron"
    unknown = table == "megatron" and passthrough.settings(table) is None and flag not in ALSO_MEGATRON
    if unknown and nearest(flag, mine) is not None:
        return None
    return passthrough.find_setting(table, flag, shown)


def settle_value(target: Target, value: Any, shown: str) -> Any:
    """The value to store for `target` when a file says `value`.

    Raises:
        UsageError: if it is of another type.
    """
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

    Bounds, and what options say together, are left to `recipe.resolve_stages`.

    Raises:
        UsageError: all that is wrong with them.
    """
    found: dict[str, Any] = {}
    wrong: list[UsageError] = []
    for key, value in values.items():
        try:
            if key not in ("megatron", "vllm"):
                put(found, find_key(key, where, extra), value, f"{where}: {key}")
            elif isinstance(value, dict):
                found.setdefault(key, {}).update(gather_table(key, value, f"{where}: [{key}]"))
            else:
                raise UsageError(f"{where}: {key} = {spell(value)}: expected a table")
        except UsageError as error:
            wrong.append(error)
    raise_together(wrong)
    return found


def gather_table(table: passthrough.Table, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys and values of [megatron] or [vllm] -> values by field, checked; values by field come back as they are."""
    found: dict[str, Any] = {table: {}}
    wrong: list[UsageError] = []
    for key, value in values.items():
        try:
            put(found, find_in(table, key, where), value, f"{where} {key}")
        except UsageError as error:
            wrong.append(error)
    raise_together(wrong)
    return found[table]


def put(found: dict[str, Any], target: Target, value: Any, shown: str) -> None:
    """Store a file's value where it belongs."""
    place = found.setdefault(target.table, {}) if target.table else found
    place[target.field] = settle_value(target, value, shown)


# ---- unknown names

CLOSE = 0.9  #: how similar two names must be (`difflib.ratio`) where they do not consist of the same words
ALIKE = 0.8  #: the same where every word of the one is in the other
WORD = 0.65  #: and those words themselves


def advice(flag: str, known: Collection[str], spell: Callable[[str], str]) -> str:
    """What to do about the unknown name `flag`.

    Args:
        flag, known: names as flags have them, without dashes in front.
        spell: how a name is written where the user wrote it.
    """
    found = nearest(flag, known)
    return f"did you mean {spell(found)}?" if found else "see hpcrl run --help"


def nearest(flag: str, known: Iterable[str]) -> str | None:
    """The known name that `flag` is a slip of, or None: the same words, some of them misspelt or left out, or almost
    the same letters."""
    name, names = flag.replace("_", "-").strip("-"), list(known)
    if name in names:
        return name
    for found in difflib.get_close_matches(name, names, n=5, cutoff=ALIKE):
        if difflib.SequenceMatcher(None, name, found).ratio() >= CLOSE or _same_words(name, found):
            return found
    return None


def _same_words(name: str, found: str) -> bool:
    return all(difflib.get_close_matches(word, found.split("-"), n=1, cutoff=WORD) for word in name.split("-"))
