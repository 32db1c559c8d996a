"""`hpcrl launch`: a run over the machines of a hostfile, with mpirun.

Invariant: under mpirun the command is one of its ranks (hpcrl/launch/mpi/rank_main.py); otherwise it calls mpirun and
waits for its end (hpcrl/launch/mpi/mpirun.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcrl.cli.recipe_argument import chosen_recipe
from hpcrl.config.flags import parse_flags
from hpcrl.config.recipe import Recipe
from hpcrl.config.slime.verbatim import split_arguments
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from hpcrl.launch.mpi.hostfile import read_hostfile
from hpcrl.launch.mpi.mpirun import call_mpirun, under_mpi

USAGE = """\
usage: mpirun --hostfile FILE [mpirun's options] hpcrl launch [RECIPE.toml] --hostfile FILE [--option value ...]
       hpcrl launch [RECIPE.toml] --hostfile FILE [--mpirun COMMAND] [--agent COMMAND] [--option value ...]
       hpcrl launch --resume RUN --hostfile FILE [--live-code] [...]
       hpcrl launch --hostfile FILE [...] -- ARGUMENTS     the arguments of a slime or vime script

  --hostfile FILE    the machines and their slots, in any dialect; the order of roles and ranks comes from it
  --mpirun COMMAND   mpirun with arguments, such as "mpirun --mca btl_tcp_if_include eth0"; default: mpirun
  --agent COMMAND    how mpirun reaches a host, such as "ssh -p 2222"; default: ssh
  --dry-run          print the plan, the groups and the command; start nothing
  --print            print the command alone

The second form checks that every host answers, then calls mpirun, which starts one process on each host. Options are
those of hpcrl run; without a recipe the command takes recipe.toml of this directory."""

OWN = {
    "hostfile": Kind("str"),
    "mpirun": Kind("str"),
    "agent": Kind("str"),
    "resume": Kind("str"),
    "dry-run": Kind("bool"),
    "print": Kind("bool"),
}


def launch(argv: list[str]) -> int:
    """The command, as a rank or as the one that calls mpirun."""
    before, arguments = split_arguments(argv)
    overrides, own, words = parse_flags(before, OWN)
    resume = Path(own["resume"]) if "resume" in own else None
    recipe = _recipe(words, arguments, overrides, resume)
    if under_mpi(os.environ) and not (own.get("dry-run") or own.get("print")):
        from hpcrl.launch.mpi.rank_main import run_ranks

        hosts = list(read_hostfile(own["hostfile"]).hosts) if "hostfile" in own else None
        return run_ranks(recipe, overrides, resume, hosts)
    if recipe is not None and not words and arguments is None:  # every rank is told which
        argv = [recipe.path.name, *argv]
    return call_mpirun(argv, recipe, overrides, resume, own)


def _recipe(
    words: list[str], arguments: list[str] | None, overrides: dict[str, Any], resume: Path | None
) -> Recipe | None:
    if resume:
        if words or overrides.keys() - {"live_code"} or arguments is not None:
            raise UsageError(
                "--resume takes no options but --live-code",
                "leave recipe and options out",
            )
        return None
    return chosen_recipe(words, arguments, overrides, "hpcrl launch", quiet=under_mpi(os.environ))
