"""`hpcrl plan`, and what `--dry-run` prints on this machine: who would run where, and which ranks form which group.

Invariant: nothing is written and nothing is started.  What the run would refuse is refused here, by the same checks;
but a plan may be made where the files of the run are not, so what `plan` does not find is a note.
The last line says whether the run fits its GPUs; a trainer that does not is an error, with what makes it fit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, changed, load_recipe, resolve_stages
from hpcrl.config.setting_names import spell
from hpcrl.config.slime.verbatim import recipe_and_refusals, split_arguments
from hpcrl.config.value_types import Kind
from hpcrl.errors import DataError, UsageError, raise_together
from hpcrl.groups import describe
from hpcrl.launch.model_directory import with_shipped_config
from hpcrl.launch.preflight import (
    HostView,
    made_by_run,
    model_notes,
    note_absent,
    refuse_settings,
    refuse_what_cannot_run,
)
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.plan import Host, Plan, hosts_kept, local_hosts, make_plan
from hpcrl.planning.formulas.gpu_specs import DEFAULT, named
from hpcrl.planning.memory.report import memory_lines, refuse_misfit, verdict
from hpcrl.planning.memory.weight_update import LINK, predict, update_lines
from hpcrl.rollout.prompts.first_rows import look_at
from hpcrl.run.gpu_environment import for_this_machine

USAGE = """\
usage: hpcrl plan [RECIPE.toml] [--hostfile FILE] [--option value ...]
       hpcrl plan [--hostfile FILE] [--option value ...] -- ARGUMENTS     the arguments of a slime or vime script

  --hostfile FILE    the machines and their slots; default: this machine, with as many slots as needed
  --groups           show every process and parallel group with its ranks and hosts
  --gpu NAME         the GPUs, for their memory (docs/sizing.md lists them); default: h100-sxm
  --gpu-memory GIB   memory of a GPU; default: that of --gpu
  --host-memory GIB  memory of a host; more is an error; default: a warning above 2000
  --link-rate GBIT   Gb/s of a card's network link, for the time of a weight update; default: 400

The memory estimate needs config.json of --hf-checkpoint. Options are those of hpcrl run; without a recipe the command
takes recipe.toml of this directory. If some arguments are wrong, it shows the plan of the others, then the errors."""

TABLE = 12  #: lines of the table of processes
OWN = {
    "hostfile": Kind("str"),
    "groups": Kind("bool"),
    "gpu": Kind("str"),
    "gpu-memory": Kind("float", bounds="> 0"),
    "host-memory": Kind("float", bounds="> 0"),
    "link-rate": Kind("float", bounds="> 0"),
}


def plan(argv: list[str]) -> int:
    """The command."""
    before, arguments = split_arguments(argv)
    overrides, own, words = parse_flags(before, OWN)
    word = choose_recipe(words, arguments, "hpcrl plan")
    hosts = None
    if "hostfile" in own:
        from hpcrl.launch.mpi.hostfile import read_hostfile

        found = read_hostfile(own["hostfile"])
        hosts = list(found.hosts)
        for note in found.notes:
            print(f"hpcrl: note: {note}", file=sys.stderr)
    memory = own.get("gpu-memory", named(own.get("gpu", DEFAULT)).memory)
    every = bool(own.get("groups"))
    card = GpuCard(memory, own.get("link-rate", LINK), own.get("host-memory"))
    if arguments is None:
        show(load_recipe(word), overrides, hosts, card, every)
        return 0
    recipe, refused = recipe_and_refusals(arguments, overrides)
    try:
        show(recipe, overrides, hosts, card, every)
    except UsageError:
        if not refused:  # else they tell, among what is wrong, the rules that the rest breaks
            raise
    raise_together(refused)
    return 0


@dataclass(frozen=True)
class GpuCard:
    """What the estimates take for given.

    Attributes:
        memory: GiB of a GPU.
        link: the rate of its network link in Gb/s.
        host: GiB of a host, if that is known.
    """

    memory: float
    link: float
    host: float | None


def show(
    recipe: Recipe, overrides: dict[str, object], hosts: list[Host] | None, card: GpuCard, every: bool = False
) -> None:
    """Print the plan of every stage, the memory that it takes on such cards, what a weight update moves, and whether
    all of it fits.

    Args:
        every: with each process and each group.
    """
    options = resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"})
    refuse_settings(options, lambda o: hosts or local_hosts(o), packages=False)
    look_at(options)
    note_absent(recipe, options)
    options = [with_shipped_config(resolved) for resolved in options]
    for line in model_notes(options):
        print(f"hpcrl: note: {line}", file=sys.stderr)
    wrong: list[UsageError] = []
    for stage, resolved in zip(recipe.stages, options, strict=True):
        made = make_plan(resolved, hosts or local_hosts(resolved), "plan", kept=hosts_kept(options))
        lines, misfit = _estimates(resolved, made, card)
        wrong += misfit
        title = f"# stage {stage.name}\n" if stage.name else ""
        print(f"{title}{made.table(None if every else TABLE)}\n\n{describe(resolved, made, every)}\n")
        print("\n".join(lines) + "\n")
    raise_together(wrong)


def _estimates(options: Options, made: Plan, card: GpuCard) -> tuple[list[str], list[UsageError]]:
    """(memory and weight updates, or why there is no estimate; what cannot fit such cards, or their hosts)."""
    try:
        config = read_config(options.hf_checkpoint or "")
        family = find_family(config, options.hf_checkpoint or "")
        lines = list(memory_lines(options, family, config, card.memory, card.host))
        last = verdict(options, family, config, card.memory, lines)
        if made.engines and not options.debug_rollout_only:
            lines += ["", *update_lines(predict(options, family, config, made, card.link))]
    except DataError as error:
        return [f"memory: not estimated: {error.what}"], []
    lines += ["", last] if last else []
    try:
        if not options.debug_rollout_only and options.bf16:  # in fp32 it is on CPUs
            refuse_misfit(options, family, config, card.memory, card.host)
    except UsageError as error:
        return lines, [error]
    return lines, []


def preview(recipe: Recipe, overrides: dict[str, Any]) -> None:
    """What `--dry-run` prints: for each stage the plan, and the options that differ from their defaults.

    Then UsageError or DataError for what the run would refuse.
    """
    parts, overrides = [], for_this_machine(recipe, overrides)
    options = resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"})
    for stage, resolved in zip(recipe.stages, options, strict=True):
        plan = make_plan(resolved, local_hosts(resolved), "dry-run")
        rows = "\n".join(f"{name} = {spell(value)}" for name, value in changed(resolved))
        title = f"stage {stage.name} of {recipe.name}" if stage.name else recipe.name
        parts.append(f"# {title}\n{plan.table()}\n\n{rows}")
    print("\n\n".join(parts))
    for line in model_notes(options):
        print(f"hpcrl: note: {line}", file=sys.stderr)
    sight = HostView(lambda path: made_by_run(recipe, "{run}", path))
    refuse_what_cannot_run(options, local_hosts, sight, packages=True)
