"""`hpcrl fit RECIPE`: the shapes that hold a run, as a table, and one of them as a recipe.

Invariants: nothing is submitted, and nothing is written but what --apply names, where there was no file; what is
written passes the checks of `hpcrl plan`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.flags import flag_words, parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.config.value_types import Kind
from hpcrl.errors import DataError, UsageError
from hpcrl.fit.applied_recipe import with_settings
from hpcrl.fit.rehearsed import rehearsals, rehearse_best
from hpcrl.fit.rows import FitRow, make_rows, worthwhile
from hpcrl.fit.search import PLACES, FitTarget, FoundShapes, Search, base_options
from hpcrl.fit.shapes import KEYS, own_shape
from hpcrl.fit.starts import with_starts
from hpcrl.fit.table import close_lines, nearest_lines, notes, table
from hpcrl.launch.preflight import refuse_settings
from hpcrl.launch.site import FLAGS, SiteProfile, from_flags
from hpcrl.memory.fits import cheapest
from hpcrl.model_files.config_json import read_config
from hpcrl.models.family import find_family
from hpcrl.plan import local_hosts
from hpcrl.recipe_here import choose_recipe
from hpcrl.rehearsal.site_card import least
from hpcrl.run.rundir import write_atomic, write_first
from hpcrl.speed.cards import CARDS, DEFAULT, named
from hpcrl.untrusted_files import read_given

USAGE = """\
usage: hpcrl fit [RECIPE.toml] [--site SITE] [--max-nodes N] [--rehearse K] [--apply ROW [-o FILE]] [--option value ...]

The shapes that hold the run: nodes, parallel sizes, engines, shared GPUs or not; each passes the checks and the memory
figures of hpcrl plan, the best are rehearsed; in the order of their expected end, with a rough estimate of their speed
(docs/fit.md).

  --site SITE        profile of the cluster (also --time, --layout, --set, as hpcrl submit has them)
  --max-nodes N      nodes of the job at most; default: twice those of the recipe
  --rehearse K       the K best are rehearsed (hpcrl rehearse): a minute or two each for a large model; default: 3
  --apply ROW        write the recipe with the shape of that row, its comments kept, to RECIPE-fit.toml
  --output FILE      or -o FILE: to that file; --force: in place of one that is there
  --gpus-per-node N  GPUs of a node; default: the site's, else those that the recipe uses on one
  --gpu NAME         the GPUs (docs/memory.md lists them); default: those of the site's gpu_type, else h100-sxm
  --gpu-memory GIB   what a GPU has; default: that of --gpu
  --host-memory GIB  what a host has for the run
  --link-rate GBIT   Gb/s of a card's network link; default: 400
  --mean-response-length TOKENS   default: half of --rollout-max-response-len
  --json             for programs: one JSON object

Options are those of hpcrl run; what a flag sets of the shape is in every row. Without a recipe it is recipe.toml of
this directory."""

UNKNOWN = "default"  #: the name of the profile where none is named

OWN = {
    **FLAGS,
    "max-nodes": Kind("int", bounds="> 0"),
    "rehearse": Kind("int", bounds=">= 0"),
    "apply": Kind("int", bounds="> 0"),
    "output": Kind("str"),
    "force": Kind("bool"),
    "gpus-per-node": Kind("int", bounds="> 0"),
    "gpu": Kind("str"),
    "gpu-memory": Kind("float", bounds="> 0"),
    "host-memory": Kind("float", bounds="> 0"),
    "link-rate": Kind("float", bounds="> 0"),
    "mean-response-length": Kind("int", bounds="> 0"),
    "json": Kind("bool"),
    "help": Kind("bool"),
}


def fit(argv: list[str]) -> int:
    """The command."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    flags, own, words = parse_flags(["--output" if word == "-o" else word for word in argv], OWN)
    _check_own(own)
    source = choose_recipe(words, None, "hpcrl fit")
    count = rehearsals(own.get("rehearse"))
    file = _free_place(Path(source), own)
    recipe, site = load_recipe(source), from_flags(own)
    if len(recipe.stages) > 1:
        named_so = ", ".join(stage.name for stage in recipe.stages)
        raise UsageError(f"{source} has several stages ({named_so})", "write a recipe of the one that asks for most")
    base = base_options(recipe, flags, site)
    if base.debug_rollout_only:
        raise UsageError(f"{source} trains nothing (--debug-rollout-only)", "fit is about runs that train")
    target = _target(base, site, own)
    asks = site.name != UNKNOWN or "set" in own  # else neither partitions nor nodes are known
    site = site if asks else _with_node(site, target.node)
    search = Search(recipe, flags, site, target)
    most = own.get("max-nodes") or 2 * _own_nodes(base, target.node)
    found = search.shapes(most)
    if not found.fitting:
        raise _nothing(found, target, most)
    rows = make_rows(worthwhile(found.fitting, own_shape(search.base)), target)
    if asks:
        rows = with_starts(rows, recipe, flags, site)
    rows = rehearse_best(rows, count, target)
    _show(rows, found, target, own)
    if "apply" in own:
        _apply(file, Path(source), rows, flags, site, own)
    return 0


def _free_place(source: Path, own: Mapping[str, Any]) -> Path:
    """Where --apply writes to.

    Raises:
        UsageError: if something is there.
    """
    file = Path(own["output"]) if "output" in own else source.with_name(f"{source.stem}-fit.toml")
    if "apply" in own and file.exists() and (not own.get("force") or file.resolve() == source.resolve()):
        raise UsageError(f"{file} is there already", "give -o FILE, or --force to replace one that is not the recipe")
    return file


def _check_own(own: Mapping[str, Any]) -> None:
    for name in ("output", "force"):
        if name in own and "apply" not in own:
            raise UsageError(f"--{name} has no effect without --apply", "give --apply ROW, or leave it out")


# ---- what is asked for


def _target(options: Options, site: SiteProfile, own: Mapping[str, Any]) -> FitTarget:
    """The model, and the GPUs of the site."""
    try:
        config = read_config(options.hf_checkpoint or "")
        family = find_family(config, options.hf_checkpoint or "")
    except DataError as error:
        raise UsageError(error.what, "shapes are found from config.json: name a model that is here") from None
    card = own.get("gpu") or _card_of_site(site)
    memory = own.get("gpu-memory", named(card).memory)
    node = own.get("gpus-per-node") or site.trainer.gpus_per_node or min(8, _used_on_node(options))
    more = (own.get("host-memory"), own.get("mean-response-length"), own.get("link-rate"))
    return FitTarget(family, config, card, memory, node, *more)


def _card_of_site(site: SiteProfile) -> str:
    """The name of the site's GPUs; of several that its gpu_type may mean, the one with least memory."""
    kind = getattr(site.trainer, "gpu_type", None)
    if not kind:
        return DEFAULT
    memory = least(kind, site.name)
    plain = kind.lower().replace("_", "-").removeprefix("nvidia-")
    fitting = [name for name, card in CARDS.items() if name == plain or name.startswith(f"{plain}-")]
    return next(name for name in fitting if CARDS[name].memory == memory)


def _used_on_node(options: Options) -> int:
    """GPUs that the recipe uses on one node."""
    if options.actor_num_nodes == 1:
        return local_hosts(options)[0].slots
    return options.actor_num_gpus_per_node


def _with_node(site: SiteProfile, node: int) -> SiteProfile:
    """The site, its nodes of so many GPUs where it does not say; 0 of its own means that slots are processes."""
    if site.trainer.gpus_per_node is not None:
        return site
    trainer = site.trainer.model_copy(update={"gpus_per_node": node})
    return site.model_copy(update={"trainer": trainer})


def _own_nodes(options: Options, node: int) -> int:
    gpus = options.trainer_slots + (0 if options.colocate else options.engine_gpus)
    return max(1, -(-gpus // node))


def _nothing(found: FoundShapes, target: FitTarget, most: int) -> UsageError:
    """The error where no shape holds the run."""
    miss = found.nearest
    if miss is None:
        return UsageError("no shape is what the flags ask for", f"leave out one of those that set {', '.join(KEYS)}")
    change = miss.options and cheapest(miss.options, target.family, target.config, target.memory)
    hint = f"raise --max-nodes, or give {change}" if change else "raise --max-nodes" if miss.options else ""
    return UsageError(*nearest_lines(miss, hint, most))


# ---- what is answered


def _show(rows: list[FitRow], found: FoundShapes, target: FitTarget, own: Mapping[str, Any]) -> None:
    if own.get("json"):
        facts: dict[str, Any] = {"gpu": target.card, "gpu_memory_gib": target.memory, "gpus_per_node": target.node}
        facts |= {"rows": [row.facts() for row in rows], "left_out": list(close_lines(found.missed))}
        print(msgspec.json.encode(facts).decode())
        return
    print(table(rows, target, time.time()))
    print()
    for line in (*notes(rows, rows[0].found.speed), *close_lines(found.missed)):
        print(line)


def _apply(
    file: Path, source: Path, rows: list[FitRow], flags: Mapping[str, Any], site: SiteProfile, own: Mapping[str, Any]
) -> None:
    """Write the recipe with the shape of a row."""
    if own["apply"] > len(rows):
        raise UsageError(f"--apply {own['apply']}: there are {len(rows)} rows")
    row = rows[own["apply"] - 1]
    if row.refused:
        raise UsageError(f"--apply {own['apply']}: this shape is refused: {row.refused}", "take another row")
    text = read_given(source)
    if "{recipe}" in text and file.resolve().parent != source.resolve().parent:
        raise UsageError(
            f"-o {file}: the recipe names files next to it with {{recipe}}", f"write it to {source.parent}"
        )
    made = with_settings(text, row.found.settings)
    rest = {name: value for name, value in flags.items() if name not in KEYS}
    tried = file.with_name(f".{file.stem}-{os.getpid()}.toml")
    try:
        write_atomic(tried, made.encode())
        _check(load_recipe(tried), rest, site, row)
    finally:
        tried.unlink(missing_ok=True)
    if own.get("force"):
        write_atomic(file, made.encode())
    elif not write_first(file, made.encode()):
        raise UsageError(f"{file} is there already", "give -o FILE")
    more = " ".join(["", *flag_words(rest)])
    to = f" --site {own['site']}" if "site" in own else ""
    print(f"\nwrote {file}; next: hpcrl submit {file}{to}{more} --dry-run", file=sys.stderr)


def _check(recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile, row: FitRow) -> None:
    """Raise UsageError unless what was written passes the checks of `hpcrl plan`, and is the row's shape."""
    options = resolve_stages(recipe, site.options(recipe, flags), PLACES)
    refuse_settings(options, lambda _: row.found.request.hosts(), packages=False)
    if options[0] != row.found.options.model_copy(update={"name": options[0].name}):
        raise UsageError(
            f"{recipe.path.name} would not be of that shape", "set its keys by hand: hpcrl fit --json has them"
        )
