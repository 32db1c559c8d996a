"""`hpcrl rehearse RECIPE`: the distinct ranks take a step on fake tensors, and what would end the run is said.

Invariants: nothing is written outside a temporary directory, and no job is started but with --on-node; what the run
would refuse is refused here first, by the checks of `hpcrl plan`.
"""

from __future__ import annotations

import contextlib
import os
import time

from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError, raise_together
from hpcrl.launch.model_directory import with_shipped_config
from hpcrl.launch.preflight import refuse_settings
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.plan import local_hosts
from hpcrl.planning.formulas.engine_memory import engine_terms
from hpcrl.planning.formulas.training_memory import GIB
from hpcrl.planning.rehearsal.engine_section import (
    as_chosen,
    cache_line,
    choice_lines,
    engine_line,
    of_cache,
    of_choices,
    of_engine,
)
from hpcrl.planning.rehearsal.on_node import on_node
from hpcrl.planning.rehearsal.problems import findings, lines, unshown, verdict
from hpcrl.planning.rehearsal.ranks import distinct, named
from hpcrl.planning.rehearsal.runner import asking_engine, run_ranks
from hpcrl.planning.rehearsal.site_gpu import memory_of_card, memory_of_engines

USAGE = """\
usage: hpcrl rehearse [RECIPE.toml] [--site SITE | --gpu NAME] [--ranks WHICH] [--on-node] [--option value ...]

Every distinct rank of the trainer builds its model and optimizer and takes a step on fake tensors. This needs
config.json of --hf-checkpoint, but no GPU, no weights and hardly any memory. Settings that Megatron refuses, too little
memory and ranks that do not match are errors (docs/sizing.md). vLLM then says what it chooses for an engine on H100s.

  --site SITE        the GPUs that the site's profile names with gpu_type, for trainers and for engines
  --gpu NAME         the GPUs (docs/sizing.md lists them); default: h100-sxm
  --gpu-memory GIB   memory of a GPU; default: that of --gpu or --site
  --ranks WHICH      all, or numbers with commas; default: the first and the last of each distinct pipeline stage
  --at-once N        ranks at a time; default: a core each
  --on-node          run on one node of the site (--site or $HPCRL_SITE), as a job or, inside a job, as a step of it;
                     --gpu and --gpu-memory then need --site

Options are those of hpcrl run; without a recipe the command takes recipe.toml of this directory."""

OWN = {
    "site": Kind("str"),
    "gpu": Kind("str"),
    "gpu-memory": Kind("float", bounds="> 0"),
    "ranks": Kind("str"),
    "at-once": Kind("int", bounds="> 0"),
    "on-node": Kind("bool"),
}


def rehearse(argv: list[str]) -> int:
    """The command."""
    overrides, own, words = parse_flags(argv, OWN)
    chosen = choose_recipe(words, None, "hpcrl rehearse")
    recipe = load_recipe(chosen)
    options = resolve_stages(recipe, overrides, {"run": "{run}", "prepared": "{run}/prepared"})
    refuse_settings(options, local_hosts, packages=False)
    card = own.get("gpu-memory"), own.get("gpu")
    site = None if own.get("on-node") and card != (None, None) else own.get("site")  # which names the node
    gpu = memory_of_card(*card, site)
    engines = memory_of_engines(options, gpu, site)
    if own.get("on-node"):
        return on_node(argv if words else [chosen, *argv], own)
    options = [with_shipped_config(resolved) for resolved in options]
    at_once = own.get("at-once", len(os.sched_getaffinity(0)))
    wrong: list[HpcrlError] = []
    for stage, resolved in zip(recipe.stages, options, strict=True):
        if stage.name:
            print(f"# stage {stage.name}")
        wrong += _stage(resolved, gpu, engines, own.get("ranks"), at_once)
    raise_together(wrong)
    return 0


def _stage(options: Options, gpu: float, engines: float, which: str | None, at_once: int) -> list[HpcrlError]:
    """Print what the ranks of one stage took; what is wrong.

    Args:
        gpu, engines: GiB of a GPU of the trainers, and of the engines.
    """
    if options.debug_rollout_only:
        print("nothing is trained: no rank to rehearse")
        return []
    begun = time.monotonic()
    config = read_config(options.hf_checkpoint or "")
    family = find_family(config, options.hf_checkpoint or "")
    ranks = distinct(options, family, config) if which is None else named(which, options)
    with asking_engine(options) if options.num_engines else contextlib.nullcontext() as answer:
        reports = run_ranks(options, ranks, at_once)
        asked = answer() if answer else None
    print("\n".join([*lines(options, reports, gpu), *unshown(reports)]))
    if asked:
        print(engine_line(asked))
        cache = engine_terms(as_chosen(options, asked), family, config, engines * GIB)
        if not (asked.absent or asked.error):
            print("\n".join([*choice_lines(options, cache, asked), cache_line(options, cache, asked)]))
    shown = sum(not report.unshown for report in reports)
    print(f"rehearsed: {shown} of {options.world_size} ranks in {time.monotonic() - begun:.0f} s")
    faults = findings(options, family, config, reports, gpu)
    if asked:
        faults += of_engine(asked) + of_choices(asked) + of_cache(options, cache, asked)
    if not faults and shown:
        print(verdict(options, [report for report in reports if not report.error], gpu))
    return [UsageError(found.what, found.hint) for found in faults]
