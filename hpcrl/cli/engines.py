"""`hpcrl engines`: the engines of a run, which there are and how they are; and engines that no run has started (serve).

Invariant: a run is only read.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.cli.find_run import find_run
from hpcrl.cli.recipe_argument import choose_recipe
from hpcrl.cli.try_target import sampling_stage
from hpcrl.config.flags import parse_flags
from hpcrl.config.recipe import load_recipe
from hpcrl.config.rules.layout import ADDRS, KEYS, split_address
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.standalone_engine import PROGRAM, prepare
from hpcrl.report.status_text import engine_table, shorten_path
from hpcrl.run.engine_files import read_views
from hpcrl.utils.arguments import RUN, Parser
from hpcrl.utils.plain_text import strip_control


def engines(argv: list[str]) -> int:
    """`hpcrl engines RUN`, `hpcrl engines serve RECIPE`."""
    verbs = {"serve": serve}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    parser = Parser(
        "engines",
        "List the engines of a run. hpcrl engines serve RECIPE starts one without a run.",
        verbs,
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    stage = run.stage
    views = read_views(stage.here) if stage is not None and stage.attempt is not None else None
    if views is None:
        name = shorten_path(str(run.root))
        raise HpcrlError(
            f"{name} has not reported any engines",
            "the run has no engines or has not started them yet: see hpcrl status",
        )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(views), indent=1).decode())
        return 0
    print(strip_control(engine_table(views, time.time()), lines=True))
    return 0


# ---- hpcrl engines serve

SERVE_USAGE = f"""\
usage: hpcrl engines serve RECIPE.toml --listen HOST:PORT --keys DIR [--option value ...]

  An engine that answers at HOST:PORT until it is ended, for one run after another. Its model, sizes and settings are
  those that the recipe's engines have; give it the GPUs with CUDA_VISIBLE_DEVICES.

  --listen HOST:PORT   where it answers: an address of this machine on the network of the runs that will ask it
  --keys DIR           where its keys are, or are made; a run that uses it has to read them, and no one else may
  --stage NAME         whose settings, in a recipe of stages (default: the last that needs engines)

A run asks it with {ADDRS} HOST:PORT {KEYS} DIR."""
SERVE_FLAGS = {"listen": Kind("str"), "keys": Kind("str"), "stage": Kind("str"), "help": Kind("bool")}
#: what a recipe may say of its run, which is none here
_NOWHERE = {"run": "{run}", "prepared": "{run}/prepared"}


def serve(argv: list[str]) -> int:
    """The command; becomes the engine's own process."""
    overrides, own, words = parse_flags(argv, SERVE_FLAGS)
    if "help" in own:
        print(SERVE_USAGE)
        return 0
    if not {"listen", "keys"} <= own.keys():
        raise UsageError("--listen and --keys are needed", "hpcrl engines serve RECIPE --listen HOST:PORT --keys DIR")
    split_address(own["listen"], "--listen")
    recipe = load_recipe(choose_recipe(words, None, "hpcrl engines serve"))
    _, options = sampling_stage(recipe, overrides, _NOWHERE, own.get("stage"))
    if "{run}" in (options.hf_checkpoint or ""):
        raise UsageError(
            f"--hf-checkpoint does not exist before the run: {options.hf_checkpoint}", "give --hf-checkpoint"
        )
    if options.colocate:
        raise UsageError("--colocate: only a run starts engines that share the trainer's GPUs", "leave it out")
    rundir = prepare(options, own["listen"], Path(own["keys"]).expanduser().resolve())
    return os.execv(sys.executable, [sys.executable, "-m", PROGRAM, str(rundir.root), "--attempt", "0"])
