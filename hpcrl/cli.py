"""The command `hpcrl`.

Invariants: nothing heavy is imported here (no torch, vLLM or Megatron, and pydantic only where options are needed), so
help comes at once; whatever a user can do wrong ends as one line on stderr and a non-zero exit status.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpcrl import __version__
from hpcrl.errors import HpcrlError, Stopped, UsageError
from hpcrl.plain_text import strip_control

HELP = """\
hpcrl: reinforcement-learning post-training of language models as a plain batch job

  hpcrl run RECIPE.toml [--option value ...]   run a recipe on this machine
  hpcrl run RECIPE.toml --dry-run              show who would run where, and with which options; start nothing
  hpcrl run --help                             the options of a first run; --help-all: every one, with default and source
  hpcrl submit RECIPE.toml [--site S]          run it as one batch job (Slurm); --dry-run shows plan, script, command
  hpcrl launch RECIPE.toml --hostfile FILE     run it over the machines of a hostfile with mpirun
  hpcrl eval RECIPE|CHECKPOINT|HF-DIR          sample and grade held-out prompts, train nothing; --site S: as a batch job
  hpcrl resume RUN                             go on with a run, the way that it was started
  hpcrl plan RECIPE.toml [--hostfile FILE]     ranks, hosts, GPUs and parallel groups, over the hosts of a hostfile
  hpcrl import SCRIPT.sh > RECIPE.toml         read a run script of slime's or vime's
  hpcrl submit [--site S] -- ARGUMENTS ...     the arguments of such a script as they stand; also run, plan, launch
  hpcrl hostfile FILE [--to DIALECT]           say what a hostfile means, or write it for another launcher
  hpcrl doctor [RECIPE.toml] [--site S] [--nodes]   is all there that a run needs: login node, site, nodes
  hpcrl selftest [--site S] [--hosts N]        numbers, transports and memory on your hardware: passed, failed, skipped
  hpcrl convert WHAT ...                       checkpoints: to-torch-dist, to-hf, to-fp8; ... WHAT --help
  hpcrl status [RUN]                           what runs are doing: all of them, or one in full
  hpcrl runs [--clean]                         where they lie; those that never came to a step
  hpcrl watch RUN                              the same, live, until it ends
  hpcrl logs RUN [--role R] [--host H] [-f]    what its processes say
  hpcrl samples RUN [--step N] [--worst]       prompts, responses and rewards; --diff A B: of two steps or runs
  hpcrl engines RUN                            its engines; engines add, remove: more, one less; engines serve: one of no run
  hpcrl report RUN [-o FILE]                   one HTML file: curves, timeline, what it cost, samples
  hpcrl trace RUN; hpcrl bill RUN              what every process did when, for Perfetto; node-hours by what they went into
  hpcrl stop RUN                               save a checkpoint and end; hpcrl cancel RUN: end at once
  hpcrl options                                the same as a Markdown table; --megatron, --vllm: what passes through
  hpcrl --version

examples
  hpcrl run examples/quickstart.toml
  hpcrl run examples/quickstart.toml --grpo.num-rollout 20 --eval-interval 5 --run-dir runs/short
  hpcrl run examples/quickstart.toml --recompute-granularity selective --vllm-max-num-seqs 64

A recipe is a TOML file whose keys are options; a flag goes before it, --STAGE.option in that stage. Ctrl-C or SIGTERM saves a checkpoint and ends;
once more ends at once. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 stopped and saved."""

RUN_HELP = """\
usage: hpcrl run RECIPE.toml [--option value ...] [--dry-run]
       hpcrl run [--option value ...] [--dry-run] -- ARGUMENTS     slime's or vime's, as its scripts give them to train.py
       hpcrl run --resume RUN_DIR

  --dry-run                       print plan and options of each stage, and start nothing
  --resume RUN_DIR                go on with a run from its last checkpoint, with the options that it began with
  --help                          this text, with the options that a first run needs
  --help-all                      this text, with every option

The recipe comes first. Switches: --x turns on, --no-x off. Lists: words after the flag. In a recipe with stages
--STAGE.option, such as --grpo.lr 2e-5, counts in that stage; a plain flag in the stages whose own tables set it, or in
all if none does; where several set it to different values, it is refused. A flag of Megatron-core goes by
Megatron's name, one of vLLM as --vllm-NAME (list them with hpcrl options --megatron or --vllm). Each option below is
also a key of the recipe, spelled with underscores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    try:
        return command(list(sys.argv[1:] if argv is None else argv))
    except HpcrlError as error:
        print(
            f"hpcrl: {'' if isinstance(error, Stopped) else 'error: '}{strip_control(str(error), lines=True)}",
            file=sys.stderr,
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("hpcrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if (argv or sys.argv[1:])[:1] == ["run"] else 0  # a run has ended with it, and is not done
    except OSError as error:
        place = strip_control(str(error.filename or "output"))
        print(f"hpcrl: error: {place}: {error.strerror}", file=sys.stderr)
        return 1


def command(argv: list[str]) -> int:
    """Find the command and run it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if argv[0] == "--version":
        print(f"hpcrl {__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": run,
        "hostfile": hostfile,
        "convert": convert,
        "options": options,
    }
    commands |= {name: partial(_elsewhere, place) for name, place in ELSEWHERE.items()}
    if argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean hpcrl {near[0]}?" if near else f"there are {', '.join(commands)}"
        raise UsageError(f"{argv[0]} is not a command", f"{hint}; see hpcrl --help" if not near else hint)
    return commands[argv[0]](argv[1:])


# ---- commands with a file of their own

#: command -> module:function that does it
ELSEWHERE = {
    "submit": "hpcrl.commands.submit:submit",
    "plan": "hpcrl.commands.plan:plan",
    "import": "hpcrl.commands.import_script:import_script",
    "launch": "hpcrl.mpi.mpirun:launch",
    "eval": "hpcrl.commands.evaluate:evaluate",
    "resume": "hpcrl.commands.resume:resume",
    "status": "hpcrl.commands.status:status",
    "runs": "hpcrl.commands.runs:runs",
    "watch": "hpcrl.commands.status:watch",
    "logs": "hpcrl.commands.logs:logs",
    "samples": "hpcrl.commands.samples:samples",
    "engines": "hpcrl.commands.engines:engines",
    "report": "hpcrl.commands.report:report",
    "trace": "hpcrl.commands.report:trace",
    "bill": "hpcrl.commands.report:bill",
    "stop": "hpcrl.commands.stop:stop",
    "cancel": "hpcrl.commands.stop:cancel",
    "doctor": "hpcrl.commands.doctor:main",
    "selftest": "hpcrl.commands.selftest:selftest",
}


def _elsewhere(place: str, argv: list[str]) -> int:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(argv)


# ---- hpcrl run


def run(argv: list[str]) -> int:
    """`hpcrl run`: start a recipe, go on with a run, or show what would be started."""
    if {"--help", "-h", "--help-all"} & {*argv}:
        from hpcrl.config.options_doc import run_help

        print(RUN_HELP)
        print(run_help("--help-all" in argv))
        return 0
    from hpcrl.config.flags import parse_flags
    from hpcrl.config.recipe import load_recipe
    from hpcrl.config.value_types import Kind
    from hpcrl.slime.verbatim import recipe_of, split_arguments

    before, arguments = split_arguments(argv)
    overrides, own, words = parse_flags(before, {"resume": Kind("str"), "dry-run": Kind("bool")})
    if "resume" in own:
        return resume(Path(own["resume"]), overrides, [*words, *(arguments or [])], own)
    if not words and arguments is None:
        raise UsageError("no recipe given", "name it first: hpcrl run RECIPE.toml [--option value ...]")
    if len(words) + (arguments is not None) > 1:
        raise UsageError(
            f"more than one recipe: {' '.join([*words, *(['--'] if arguments is not None else [])])}",
            "flags that take one value take no more",
        )
    recipe = load_recipe(words[0]) if arguments is None else recipe_of(arguments, overrides)
    recipe = replace(recipe, name=overrides.get("name", recipe.name))  # it also names the run directory
    if own.get("dry-run"):
        from hpcrl.commands.plan import preview

        preview(recipe, overrides)
        return 0
    from hpcrl.launch.local import run_recipe

    return run_recipe(recipe, overrides, None)


def resume(directory: Path, overrides: dict[str, Any], words: list[str], own: dict[str, Any]) -> int:
    """`hpcrl run --resume`: the run's own recipe and flags count, so nothing else may be given."""
    if words or overrides or "dry-run" in own:
        extra = words[0] if words else f"--{next(iter(overrides), 'dry-run').replace('_', '-')}"
        raise UsageError(
            f"{extra} has no effect with --resume: a run goes on with the options that it began with", "leave it out"
        )
    from hpcrl.launch.local import run_recipe

    return run_recipe(None, {}, directory)


# ---- hpcrl hostfile


def hostfile(argv: list[str]) -> int:
    """`hpcrl hostfile`: print what was understood, or write it in another dialect; notes go to stderr."""
    parser = _Parser(prog="hpcrl hostfile", description="Say what a hostfile means, or write it for another launcher.")
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="Open MPI, MPICH, Intel MPI, Slurm node list, or slime's `ip slot=8`"
    )
    parser.add_argument(
        "--from", dest="job", metavar="SCHEDULER", help="the hosts of the job that this runs in: lsf, sge or pbs"
    )
    parser.add_argument("--to", metavar="DIALECT", help="write it as openmpi, mpich, intel, slime or slurm")
    args = parser.parse_args(argv)
    from hpcrl.mpi.hostfile import job_hostfile, parse_hostfile, read_hostfile, write_hostfile

    if (args.file is None) == (args.job is None):
        raise UsageError("a hostfile is wanted", "name FILE, or --from lsf, sge or pbs")
    found = read_hostfile(args.file) if args.job is None else parse_hostfile(*job_hostfile(args.job, os.environ))
    for note in found.notes:
        print(f"hpcrl: note: {note}", file=sys.stderr)
    if args.to:
        print(write_hostfile(found.hosts, args.to), end="")
        return 0
    width = max(len(host.name) for host in found.hosts)
    rank = 0
    for host in found.hosts:
        print(f"{host.name:{width}}  {host.slots} slots  ranks {rank}-{rank + host.slots - 1}")
        rank += host.slots
    return 0


# ---- hpcrl convert

#: conversion -> the module whose main(argv) does it
CONVERSIONS = {
    "to-torch-dist": "hpcrl.convert.to_torch_dist",
    "to-hf": "hpcrl.convert.to_hf",
    "to-fp8": "hpcrl.convert.to_fp8",
}


def convert(argv: list[str]) -> int:
    """`hpcrl convert`: weights from one format to another; each conversion has its own flags."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: hpcrl convert WHAT [--help] ...\n\nWHAT: {', '.join(CONVERSIONS)}")
        return 0
    if argv[0] not in CONVERSIONS:
        raise UsageError(f"hpcrl convert {argv[0]}: no such conversion", f"there are {', '.join(CONVERSIONS)}")
    return importlib.import_module(CONVERSIONS[argv[0]]).main(argv[1:])


# ---- hpcrl options


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


def options(argv: list[str]) -> int:
    """`hpcrl options`: print or write docs/options.md, or list what passes through."""
    parser = _Parser(prog="hpcrl options", description="Every option as a Markdown table.", allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--write", metavar="FILE", type=Path, help="write the table to FILE (docs/options.md)")
    which.add_argument("--megatron", action="store_true", help="list the settings of the installed Megatron-core")
    which.add_argument("--vllm", action="store_true", help="list the settings of the installed vLLM")
    args = parser.parse_args(argv)
    from hpcrl.config.options_doc import foreign_help, markdown

    if args.megatron or args.vllm:
        print(foreign_help("megatron" if args.megatron else "vllm"))
    elif args.write:
        try:
            args.write.write_text(markdown(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.write}: {error.strerror}") from error
    else:
        print(markdown(), end="")
    return 0
