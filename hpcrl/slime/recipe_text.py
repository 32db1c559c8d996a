"""A translation as a recipe: TOML that a person reads, with the list of what became of every flag.

Invariant: reading the text back gives the values of the translation, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcrl.config.setting_names import sections
from hpcrl.slime.arguments import Translation

WIDTH = 128
TITLES = {
    "refused": "cannot be honoured, and is left out",
    "translated": "goes by another name or value here",
    "needless": "is needless here",
}


def recipe_text(translation: Translation, name: str, about: str, notes: Sequence[str] = ()) -> str:
    """The recipe.  about: the first line of its comment, where it came from; notes: more lines of what was found."""
    return "\n".join(
        [*_wrapped(about), f"name = {_value(name)}", *_options(translation.values), *_story(translation, notes), ""]
    )


def summary(translation: Translation) -> list[str]:
    """One line for each flag that is not simply kept."""
    return [f"{line.reading.outcome}: {line.text()}" for line in translation.lines if _tells(line.reading)]


def _tells(reading: Any) -> bool:
    return reading.outcome != "kept" or bool(reading.why)


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    """The options, a blank line between sections; the tables at the end, as TOML wants it."""
    for _, names in sections():
        here = [name for name in names if name in values and name not in ("megatron", "vllm", "name")]
        if here:
            yield ""
            yield from (f"{name} = {_value(values[name])}" for name in here)
    for table in ("megatron", "vllm"):
        if values.get(table):
            yield from ("", f"[{table}]", *(f"{key} = {_value(item)}" for key, item in values[table].items()))


def _story(translation: Translation, notes: Sequence[str]) -> Iterator[str]:
    """The comment at the end: what became of each flag."""
    kept = translation.of("kept")
    yield ""
    yield f"# {len(kept)} of {len(translation.lines)} flags are kept as they are."
    for outcome, title in TITLES.items():
        if lines := translation.of(outcome):
            yield f"# What {title}:"
            yield from (part for line in lines for part in _wrapped(line.text(), "#   "))
    if added := [line for line in kept if line.reading.why]:
        yield "# What is set here because the defaults differ:"
        yield from (part for line in added for part in _wrapped(line.text(), "#   "))
    if notes:
        yield "# What else the script does:"
        yield from (part for note in notes for part in _wrapped(note, "#   "))


def _wrapped(text: str, lead: str = "# ") -> Iterator[str]:
    """A comment, broken between words."""
    line = lead.rstrip()
    for word in " ".join(text.split()).split(" "):
        if len(line) + 1 + len(word) > WIDTH and line.strip() != lead.strip():
            yield line
            line = f"{lead.rstrip()}   "
        line = f"{line} {word}" if line.strip() != "#" or lead == "# " else f"{lead}{word}"
    yield line


def _value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
