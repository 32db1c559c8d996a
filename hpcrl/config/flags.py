"""A command line -> options by name, as a recipe has them; and back.

Invariant: every word has been understood: one error names all that is unknown, refused or mistyped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from hpcrl.config.setting_names import find_flag, find_in, put
from hpcrl.config.stage_flags import TABLES, split_name, stage_flag
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError, raise_together
from hpcrl.utils.arguments import declare

_NUMBER = re.compile(r"-\.?\d")


def parse_flags(
    argv: Sequence[str], extra: Mapping[str, Kind] | None = None, only: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A command line -> (options that flags set, the command's own flags named in `extra`, the other words).

    Options come by name, Megatron's and vLLM's in the tables "megatron" and "vllm"; those of one stage (--grpo.lr) as
    "grpo.lr" and "grpo.megatron"; of a flag given twice the later counts, unless both add up.

    Args:
        only: the options that completion is to propose here; None: all. The command itself refuses the others.

    Raises:
        UsageError: unknown flags, missing, superfluous or mistyped values, all that there are.
    """
    declare({f"--{name}": [*map(str, kind.choices)] for name, kind in (extra or {}).items()}, options=only)
    by_stage: dict[str, dict[str, Any]] = {"": {}}
    command: dict[str, Any] = {}
    rest: list[str] = []
    wrong: list[UsageError] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            rest.append(word)
            continue
        try:
            _store_flag(word, words, extra or {}, by_stage, command)
        except UsageError as error:
            wrong.append(error)
            while words and not _is_flag(words[0]):  # whatever its values were
                words.pop(0)
    raise_together(wrong)
    found = {
        f"{stage}.{name}" if stage else name: value for stage in by_stage for name, value in by_stage[stage].items()
    }
    return found, command, rest


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def _store_flag(
    word: str, words: list[str], extra: Mapping[str, Kind], by_stage: dict[str, dict[str, Any]], command: dict[str, Any]
) -> None:
    """Store what the flag `word` says, its values taken from `words`."""
    if not word.startswith("--"):
        raise UsageError(f"{word} is an unknown option", "flags begin with two dashes; see hpcrl run --help")
    name, inline, value = word.removeprefix("--").partition("=")
    if name in extra:
        said = _read(name, extra[name], _values(words, extra[name], value if inline else None))
        if not extra[name].inside(said):  # of options the declaration's owner asks that
            raise UsageError(f"--{name} {said}: expected {extra[name]}")
        command[name] = said
        return
    stage, option = split_name(name)
    target = find_flag(option, () if stage else extra, stage)
    if target.fixed is not None:
        _read(name, Kind("bool"), [value] if inline else [])
        said = target.fixed
    else:
        said = _read(name, target.kind, _values(words, target.kind, value if inline else None))
    _store(by_stage.setdefault(stage, {}), target.table, target.field, said)


def _values(words: list[str], kind: Kind, inline: str | None) -> list[str]:
    """Take from `words` those that belong to the flag before them."""
    if inline is not None:
        return [inline]
    most, taken = kind.takes_words[1], []
    while words and not words[0].startswith("--") and (most is None or len(taken) < most):
        taken.append(words.pop(0))
    return taken


def _read(name: str, kind: Kind, words: list[str]) -> Any:
    try:
        return kind.parse(words)
    except (ValueError, RecursionError):
        if kind.base == "bool":
            raise UsageError(
                f"--{name} takes no value", f"turn it off with --no-{name}" if not name.startswith("no-") else ""
            ) from None
        raise UsageError(
            f"--{name}{''.join(' ' + w for w in words)}: expected {kind}{', got nothing' if not words else ''}"
        ) from None


def _store(overrides: dict[str, Any], table: str, field: str, value: Any) -> None:
    if table:
        overrides.setdefault(table, {})[field] = value
    elif field in TABLES:  # the whole table as one JSON object
        for key, item in value.items():
            put(overrides, find_in(field, key, f"--{field}"), item, f"--{field}: {key}")
    else:
        overrides[field] = value


# ---- and back


def flag_words(overrides: Mapping[str, Any]) -> list[str]:
    """Options by name as words of a command line, from which `parse_flags` reads the same; not the run directory, which
    is the caller's own matter."""
    return [word for name, value in overrides.items() if name != "run_dir" for word in _words(*split_name(name), value)]


def _words(stage: str, option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [stage_flag(stage, option if value else f"no_{option}")]
    if isinstance(value, list):
        return [stage_flag(stage, option), *map(_word, value)]
    return [f"{stage_flag(stage, option)}={_word(value)}"]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
