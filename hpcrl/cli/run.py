"""`hpcrl run`: start a recipe on this machine, resume a run, or show what would be started.

Invariant: a resumed run has the options that it began with, so nothing else may be given with --resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError

RUN_HELP = """\
usage: hpcrl run [RECIPE.toml] [--option value ...] [--dry-run]
       hpcrl run [--option value ...] [--dry-run] -- ARGUMENTS     the arguments of a slime or vime script
       hpcrl run --resume RUN_DIR

  --dry-run                       print plan and options of each stage; start nothing
  --resume RUN_DIR                resume a run from its last checkpoint, with its own options
  --help                          this text, with the options of a first run
  --help-all                      this text, with every option

RECIPE.toml is a file, or the folder that hpcrl init made; without it the command takes recipe.toml of this directory.
Switches: --x turns on, --no-x off. Lists: words after the flag. In a recipe with stages, a plain flag counts in every
stage; --STAGE.option, such as --grpo.lr 2e-5, counts in that stage. Flags of Megatron-core have Megatron's names, those
of vLLM are --vllm-NAME (hpcrl options --megatron or --vllm lists them). Each is also a key of the recipe, with
underscores."""


def run(argv: list[str]) -> int:
    """`hpcrl run`: start a recipe, resume a run, or show what would be started."""
    if {"--help", "-h", "--help-all"} & {*argv}:
        from hpcrl.config.options_doc import run_help

        print(RUN_HELP)
        print(run_help("--help-all" in argv))
        return 0
    from hpcrl.cli.recipe_argument import chosen_recipe
    from hpcrl.config.flags import parse_flags
    from hpcrl.config.slime.verbatim import split_arguments
    from hpcrl.config.value_types import Kind

    before, arguments = split_arguments(argv)
    mine = {"resume": Kind("str"), "dry-run": Kind("bool"), "help-all": Kind("bool")}
    overrides, own, words = parse_flags(before, mine)
    if "resume" in own:
        return _resume(Path(own["resume"]), overrides, [*words, *(arguments or [])], own)
    recipe = chosen_recipe(words, arguments, overrides, "hpcrl run")
    if own.get("dry-run"):
        from hpcrl.cli.plan import preview

        preview(recipe, overrides)
        return 0
    from hpcrl.launch.local import run_recipe

    return run_recipe(recipe, overrides, None)


def _resume(directory: Path, overrides: dict[str, Any], words: list[str], own: dict[str, Any]) -> int:
    """`hpcrl run --resume`: the run's own recipe and flags count, so nothing else may be given."""
    if words or overrides or "dry-run" in own:
        extra = words[0] if words else f"--{next(iter(overrides), 'dry-run').replace('_', '-')}"
        raise UsageError(f"{extra} has no effect with --resume: a run keeps its options", "leave it out")
    from hpcrl.launch.local import run_recipe

    return run_recipe(None, {}, directory)
