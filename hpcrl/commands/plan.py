"""`hpcrl plan`: who would run where, and which ranks form which group; starts and writes nothing."""

from __future__ import annotations

import sys

from hpcrl.config.flags import parse_flags
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError, raise_together
from hpcrl.groups import describe
from hpcrl.plan import Host, local_hosts, make_plan
from hpcrl.slime.verbatim import recipe_and_refusals, split_arguments

USAGE = """\
usage: hpcrl plan RECIPE.toml [--hostfile FILE] [--option value ...]
       hpcrl plan [--hostfile FILE] [--option value ...] -- ARGUMENTS     slime's or vime's, as its scripts give them to train.py

Options are those of hpcrl run. Of arguments that cannot all be honoured, the plan of the others is shown, then what is wrong."""

OWN = {"hostfile": Kind("str"), "help": Kind("bool")}


def plan(argv: list[str]) -> int:
    """The command."""
    before, arguments = split_arguments(argv)
    if "--help" in before or "-h" in before:
        print(USAGE)
        return 0
    overrides, own, words = parse_flags(before, OWN)
    if len(words) + (arguments is not None) != 1:
        raise UsageError(f"{len(words)} recipes given", "name one: hpcrl plan RECIPE.toml [--hostfile FILE]")
    hosts = _hosts(own["hostfile"]) if "hostfile" in own else None
    if arguments is None:
        show(load_recipe(words[0]), overrides, hosts)
        return 0
    recipe, refused = recipe_and_refusals(arguments, overrides)
    try:
        show(recipe, overrides, hosts)
    except UsageError:
        if not refused:  # else they tell, among what is wrong, the rules that the rest breaks
            raise
    raise_together(refused)
    return 0


def _hosts(file: str) -> list[Host]:
    from hpcrl.mpi.hostfile import read_hostfile

    found = read_hostfile(file)
    for note in found.notes:
        print(f"hpcrl: note: {note}", file=sys.stderr)
    return list(found.hosts)


def show(recipe: Recipe, overrides: dict[str, object], hosts: list[Host] | None) -> None:
    """Print the plan of every stage."""
    options = resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"})
    for stage, resolved in zip(recipe.stages, options, strict=True):
        made = make_plan(resolved, hosts or local_hosts(resolved), "plan")
        title = f"# stage {stage.name}\n" if stage.name else ""
        print(f"{title}{made.table()}\n\n{describe(resolved, made)}\n")
