"""The arguments of slime's or vime's train.py in place of a recipe, and a translation written as a recipe.

    hpcrl submit --site S -- ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ...

Invariants: the options are those of the recipe that `hpcrl import` writes for the same arguments; reading that recipe
back gives the values of the translation, and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.recipe import Recipe, Stage, resolve_stages
from hpcrl.config.setting_names import gather, sections
from hpcrl.config.slime.arguments import Translation, split_flags, translate
from hpcrl.errors import UsageError, parts_of, raise_together
from hpcrl.utils.plain_text import CONTROL, strip_control

PLACES = {"run": "{run}", "prepared": "{run}/prepared"}
_PROGRAM = re.compile(r"(?:.*/)?(train|train_async)\.py\Z")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """(the words before `--`, those behind it; None: there is no `--`)."""
    words = list(argv)
    if "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]


def split_program(words: Sequence[str]) -> tuple[str, list[str]]:
    """(train.py or train_async.py, its arguments); the words may begin with `python3 train.py`, or with the first
    flag."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            break
        if found := _PROGRAM.match(word):
            return f"{found[1]}.py", list(words[place + 1 :])
    return "train.py", list(words)


def recipe_of(words: Sequence[str], overrides: Mapping[str, Any]) -> Recipe:
    """The recipe that the arguments `words` stand for; what became of flags that are not simply kept goes to stderr.

    Args:
        overrides: what hpcrl's own flags before `--` set.

    Raises:
        UsageError: all that does not fit, the rules that join options included.
    """
    recipe, wrong = recipe_and_refusals(words, overrides)
    raise_together(wrong)
    return recipe


def recipe_and_refusals(words: Sequence[str], overrides: Mapping[str, Any]) -> tuple[Recipe, list[UsageError]]:
    """The recipe of what can be honoured, and all that cannot.

    Raises:
        UsageError: if there are no arguments at all.
    """
    program, arguments = split_program(words)
    if not arguments:
        raise UsageError(
            "nothing follows --", "give the arguments of train.py there: -- ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ..."
        )
    translation = translate(arguments, program)
    wrong = [*translation.wrong, *broken_rules(translation, overrides)] if translation.wrong else []
    for line in summary(translation):
        if not line.startswith("refused"):
            print(f"hpcrl: note: {strip_control(line)}", file=sys.stderr)
    name = str(overrides.get("name") or name_of(arguments))
    return recipe_from(translation, name, "The arguments after -- of the command line."), wrong


def recipe_from(translation: Translation, name: str, about: str) -> Recipe:
    """The recipe of a translation; its text is what its file would hold."""
    text = recipe_text(translation, name, about)
    values = gather(tomllib.loads(text), "the arguments")
    values.pop("name")
    return Recipe(name, Path.cwd() / "arguments.toml", values, (), (Stage("", {}),), text)


def name_of(words: Sequence[str]) -> str:
    """A name for the run: the last part of --hf-checkpoint, such as qwen3-4b."""
    try:
        given = split_flags(words).get("hf-checkpoint") or [""]
    except UsageError:
        given = [""]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(given[0]).name).strip("-.").lower()
    return name or "arguments"


def broken_rules(translation: Translation, overrides: Mapping[str, Any]) -> list[UsageError]:
    """Which rules the rest breaks, where some flags cannot be honoured.

    Left out are those that name such a flag: they may hold once it is fixed.
    """
    recipe = Recipe("arguments", Path.cwd() / "arguments.toml", translation.values, (), (Stage("", {}),))
    try:
        resolve_stages(recipe, overrides, PLACES)
    except UsageError as error:
        refused = {f"--{line.flag}" for line in translation.with_outcome("refused")}
        return [part for part in parts_of(error) if refused.isdisjoint(re.findall(r"--[a-z0-9-]+", str(part)))]
    return []


# ---- recipe text

WIDTH = 128
TITLES = {
    "refused": "cannot be honoured, and is left out",
    "translated": "has another name or value here",
    "needless": "is needless here",
}


def recipe_text(translation: Translation, name: str, about: str, notes: Sequence[str] = ()) -> str:
    """The recipe.

    Args:
        about: the first line of its comment, where it came from.
        notes: more lines of what was found.
    """
    return "\n".join(
        [*_wrapped(about), f"name = {_value(name)}", *_options(translation.values), *_story(translation, notes), ""]
    )


def summary(translation: Translation) -> list[str]:
    """One line for each flag that is not simply kept."""
    tells = [line for line in translation.lines if line.reading.outcome != "kept" or line.reading.why]
    return [f"{line.reading.outcome if line.flag else 'set'}: {line.text()}" for line in tells]


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
    kept = translation.with_outcome("kept")
    yield ""
    yield f"# {len(kept)} of {len(translation.lines)} flags are kept as they are."
    for outcome, title in TITLES.items():
        if lines := translation.with_outcome(outcome):
            yield f"# What {title}:"
            yield from (part for line in lines for part in _wrapped(line.text(), "#   "))
    if added := [line for line in kept if line.reading.why]:
        yield "# Set here because defaults differ, or because stages differ:"
        yield from (part for line in added for part in _wrapped(line.text(), "#   "))
    if notes:
        yield "# What else the script does:"
        yield from (part for note in notes for part in _wrapped(note, "#   "))


def _wrapped(text: str, lead: str = "# ") -> Iterator[str]:
    """A comment, broken between words."""
    line = lead.rstrip()
    for word in strip_control(" ".join(text.split())).split(" "):
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
        return CONTROL.sub(lambda sign: f"\\u{ord(sign[0][0]):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)
