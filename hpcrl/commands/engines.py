"""`hpcrl engines`: the engines of a run, which there are and how they are; one less (remove), more of them (add); and
engines that no run has started (serve).

Invariant: a running run is touched by nothing but marks in its directory; it does what they ask, and says when it has.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.commands.find_run import find_run, look_at_run
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.rules.layout import ADDRS, KEYS, split_address
from hpcrl.config.value_types import Kind
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.engines.add import add_here, local_name, script_of, submit_added
from hpcrl.launch.engines.standalone import PROGRAM, prepare
from hpcrl.launch.site import SiteProfile, from_flags, saved_site
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.report.run_status import WORKING
from hpcrl.report.status_text import engine_table, shorten_path, strip_control
from hpcrl.run.engine_files import EngineViews, read_views, request_removal
from hpcrl.run.owners import refuse_of_another
from hpcrl.run.role import read_options, read_plan
from hpcrl.run.rundir import RunDir
from hpcrl.toolbox.arguments import RUN, Parser


def engines(argv: list[str]) -> int:
    """`hpcrl engines RUN`, `hpcrl engines add RUN`, `hpcrl engines remove RUN INDEX`."""
    verbs = {"add": _add, "remove": _remove, "serve": serve}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    parser = Parser(
        "engines",
        "The engines of a run and their states. hpcrl engines add RUN: start more; hpcrl engines remove RUN INDEX: let "
        "one finish and end; hpcrl engines serve RECIPE: start one outside of a run.",
        verbs,
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    _, views = _of(run)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(views), indent=1).decode())
        return 0
    print(strip_lines(engine_table(views, time.time())))
    return 0


def strip_lines(text: str) -> str:
    """Text without control characters, line by line."""
    return "\n".join(strip_control(line) for line in text.splitlines())


def _of(run: Run) -> tuple[StageFiles, EngineViews]:
    """The stage at work, and its engines.

    Raises:
        HpcrlError: if it has said nothing of any.
    """
    stage = run.stage
    views = read_views(stage.here) if stage is not None and stage.attempt is not None else None
    if stage is None or views is None:
        name = shorten_path(str(run.root))
        raise HpcrlError(
            f"{name} has not reported any engines", "it has none, or has not started them yet: see hpcrl status"
        )
    return stage, views


def _add(argv: list[str]) -> int:
    parser = Parser(
        "engines add",
        "Start engines that join a running run: on this machine, or (--site) in a separate job.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--engines", type=_positive, default=1, metavar="K", help="engines a node (default 1)")
    parser.add_argument("--first-slot", type=int, metavar="S", help="on this machine: the first GPU that they use")
    parser.add_argument(
        "--site", help="profile of the cluster, as for hpcrl submit; default: the one that the run was submitted with"
    )
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes of the job (default 1)")
    parser.add_argument("--time", metavar="T", help="its time limit: minutes, H:MM:SS or D-HH:MM:SS")
    parser.add_argument("--qos", metavar="Q", help="its quality of service")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the profile, as for hpcrl submit"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job's script and submit nothing")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    stage, _ = _of(run)
    name = shorten_path(str(run.root))
    _check_runs(run, name)
    assert stage.attempt is not None
    refuse_of_another(run.root)  # its options are those of engines that run as we do
    rundir = RunDir(stage.root, stage.attempt)
    if read_options(rundir).takes_turns:
        raise UsageError(
            f"{name} has its engines on the trainer's GPUs (--colocate)", "only a run without it takes more of them"
        )
    site = _site(args, run)
    if site is None:
        taken = read_plan(rundir)
        first = taken.slots_on(local_name(rundir)) if args.first_slot is None else args.first_slot
        added = add_here(rundir, args.engines, first)
    elif args.dry_run:
        print(script_of(rundir, read_options(rundir), site, args.nodes, args.engines), end="")
        return 0
    else:
        added = submit_added(rundir, read_options(rundir), site, args.nodes, args.engines)
    print(f"{added.what}: its engines join {name} once they are up; hpcrl engines {name} shows them; log: {added.log}")
    return 0


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _check_runs(run: Run, name: str) -> None:
    if (phase := look_at_run(run).phase) not in WORKING:
        raise HpcrlError(
            f"{name} is not running: it is {phase}", "engines are added and removed while a run is running"
        )


def _site(args: argparse.Namespace, run: Run) -> SiteProfile | None:
    """The profile to submit with; None to start them on this machine."""
    saved = run.job.site if run.job else None
    flags = {"nodes": args.nodes > 1, "time": args.time, "qos": args.qos, "set": args.set, "dry-run": args.dry_run}
    if args.site is None and saved is None:
        if useless := next((flag for flag, value in flags.items() if value), None):
            raise UsageError(f"--{useless} has no effect without --site", "engines are started on this machine")
        return None
    if args.first_slot is not None:
        raise UsageError("--first-slot has no effect with --site", "leave it out")
    given = {"set": [*args.set, *([f"engine.qos={args.qos}"] if args.qos else [])]}
    given |= {key: value for key, value in (("site", args.site), ("time", args.time)) if value}
    return from_flags(given, saved_site(saved) if args.site is None and saved is not None else None)


def _remove(argv: list[str]) -> int:
    parser = Parser(
        "engines remove", "Give an engine no new requests, let it finish those it has, and end it for this attempt."
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("index", metavar="INDEX", type=int, help="its number, as hpcrl engines RUN lists it")
    args = parser.parse_args(argv)
    run = find_run(args.run)
    stage, views = _of(run)
    name = shorten_path(str(run.root))
    _check_runs(run, name)
    there = {view.index: view for view in views.engines if view.state != "gone"}
    if args.index not in there:
        raise UsageError(f"{name} has no engine {args.index}", f"it has {', '.join(map(str, sorted(there))) or 'none'}")
    if not any(view.state != "draining" for index, view in there.items() if index != args.index):
        raise UsageError(
            f"engine {args.index} is the last one of {name}", "add another before, or end the run: hpcrl stop"
        )
    assert stage.attempt is not None
    request_removal(RunDir(stage.root, stage.attempt), args.index)
    print(f"asked engine {args.index} of {name} to finish and end; hpcrl engines {name} shows when it has")
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


def _choose(stages: dict[str, Options], name: str | None) -> Options:
    with_engines = {stage: options for stage, options in stages.items() if options.needs_engines}
    if name is None and with_engines:
        found = list(with_engines.values())[-1]
    elif name in with_engines:
        found = with_engines[name]
    else:
        raise UsageError(
            f"no stage{f' {name}' if name else ''} of the recipe has engines", f"it has {', '.join(stages) or 'none'}"
        )
    if "{run}" in (found.hf_checkpoint or ""):
        raise UsageError(f"the model of the recipe is made by its run: {found.hf_checkpoint}", "give --hf-checkpoint")
    if found.colocate:
        raise UsageError("--colocate: engines that take turns with a trainer are started by its run", "leave it out")
    return found


def serve(argv: list[str]) -> int:
    """The command; becomes the engine's own process."""
    overrides, own, words = parse_flags(argv, SERVE_FLAGS)
    if "help" in own:
        print(SERVE_USAGE)
        return 0
    if len(words) != 1 or not {"listen", "keys"} <= own.keys():
        raise UsageError(
            "a recipe, --listen and --keys are needed", "hpcrl engines serve RECIPE.toml --listen HOST:PORT --keys DIR"
        )
    split_address(own["listen"], "--listen")
    recipe = load_recipe(words[0])
    stages = dict(zip([s.name for s in recipe.stages], resolve_stages(recipe, overrides, _NOWHERE), strict=True))
    rundir = prepare(_choose(stages, own.get("stage")), own["listen"], Path(own["keys"]).expanduser().resolve())
    return os.execv(sys.executable, [sys.executable, "-m", PROGRAM, str(rundir.root), "--attempt", "0"])
