"""Which recipe a command means: the file that is named, recipe.toml of the directory that is named, or that of the
current directory.

Invariant: all commands that take a recipe choose it here; a run's own copy of its recipe
is never taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrl.config.recipe import Recipe, load_recipe
from hpcrl.config.slime.verbatim import recipe_of
from hpcrl.errors import UsageError
from hpcrl.report.progress import say
from hpcrl.run.started_runs import is_run

RECIPE_HERE = "recipe.toml"


def choose_recipe(words: Sequence[str], arguments: Sequence[str] | None, command: str, quiet: bool = False) -> str:
    """The recipe's file; "" where arguments of slime's take its place.

    Args:
        words: those of the command line that are no flags.
        arguments: what came after `--`; None: there was none.
        command: for the error, such as `hpcrl run`.
        quiet: say nothing of a recipe that was not named: another process has.

    Raises:
        UsageError: if there is none, or more than one.
    """
    given = [*words, *(["--"] if arguments is not None else [])]
    if len(given) > 1:
        hint = "a flag that takes one value takes one word only"
        if {"true", "false"} & {*words}:
            hint = "a switch takes no value: --x turns it on, --no-x off"
        raise UsageError(f"more than one recipe: {' '.join(given)}", hint)
    if arguments is not None:
        return ""
    if words:
        inside = Path(words[0]) / RECIPE_HERE
        return str(inside) if inside.is_file() and not is_run(Path(words[0])) else words[0]
    if not Path(RECIPE_HERE).is_file() or is_run(Path.cwd()):
        raise UsageError(
            "no recipe given, and no recipe.toml here",
            f"name it first: {command} RECIPE.toml [--option value ...]; hpcrl init NAME writes one to start from",
        )
    if not quiet:
        say(f"the recipe is {RECIPE_HERE} of this directory")
    return RECIPE_HERE


def chosen_recipe(
    words: Sequence[str],
    arguments: list[str] | None,
    overrides: Mapping[str, Any],
    command: str,
    quiet: bool = False,
) -> Recipe:
    """The recipe of a command that also takes slime's arguments, under the name that the flags give it.

    Args:
        overrides: what the flags set; the other arguments are those of `choose_recipe`.

    Raises:
        UsageError: if there is none, more than one, or a wrong one.
    """
    word = choose_recipe(words, arguments, command, quiet)
    recipe = load_recipe(word) if arguments is None else recipe_of(arguments, overrides)
    return replace(recipe, name=overrides.get("name", recipe.name))
