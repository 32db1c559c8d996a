"""`hpcrl submit`: a recipe as one Slurm job, or as a chain of them.

Invariant: with --dry-run and --print nothing is written and nothing is submitted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from hpcrl.cli.recipe_argument import chosen_recipe
from hpcrl.config.flags import flag_words, parse_flags
from hpcrl.config.recipe import Recipe
from hpcrl.config.slime.verbatim import split_arguments
from hpcrl.config.value_types import Kind
from hpcrl.doctor.directories import file_system
from hpcrl.errors import UsageError
from hpcrl.launch.model_directory import with_shipped_config
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import FLAGS, from_flags
from hpcrl.launch.site_nodes import fitted_nodes, shown_flags
from hpcrl.launch.slurm.job_script import Submission
from hpcrl.launch.slurm.jobs import can_submit
from hpcrl.launch.slurm.partitions import responds
from hpcrl.launch.slurm.submission import chained, preview, refuse_absent_files, refuse_unfit, submit_new
from hpcrl.launch.slurm.submit import SCRIPT, SECONDS, preview_script, script_by_hand, test_only
from hpcrl.utils.untrusted_files import read_system

USAGE = """\
usage: hpcrl submit [RECIPE.toml] [--site NAME] [--time T] [--layout L] [--set KEY=VALUE ...] [--option value ...]
       hpcrl submit RECIPE.toml --dry-run       print the plan, the script and the command; submit nothing
       hpcrl submit RECIPE.toml --print         print the script of one job, to edit and submit with sbatch
       hpcrl submit [--site NAME ...] -- ARGUMENTS    the arguments of a slime or vime script

  --site NAME        profile of the cluster: sites/NAME.toml, or a path; default $HPCRL_SITE
  --time T           time limit of one attempt: minutes, H:MM:SS or D-HH:MM:SS
  --layout L         heterogeneous (trainer, engine and rollout nodes as components of one job) or homogeneous (one
                     ordinary job, its nodes divided by the plan)
  --set KEY=VALUE    a key of the profile, such as --set trainer.partition=gpu engine.partition=gpu account=abc
  --chain N          for sites that do not requeue jobs: submit N jobs that run one after another. Each continues the
                     run. Once the run is finished, the remaining jobs end without doing anything.
  --after JOB ...    start when these jobs have succeeded, such as the conversion of the model

Options are those of hpcrl run; without a recipe the command takes recipe.toml of this directory. It submits one Slurm
job, which trains to the end over any number of requeues."""

OWN = {
    **FLAGS,
    "after": Kind("str", many=True),
    "chain": Kind("int", bounds=">= 1"),
    "dry-run": Kind("bool"),
    "print": Kind("bool"),
}


def submit(argv: list[str]) -> int:
    """The command."""
    before, arguments = split_arguments(argv)
    overrides, own, words = parse_flags(before, OWN)
    if arguments is not None and own.get("print"):
        raise UsageError(
            "--print writes a script that starts a recipe's file", "hpcrl import -- ARGUMENTS > RECIPE.toml first"
        )
    recipe = chosen_recipe(words, arguments, overrides, "hpcrl submit")
    if "after" in own:
        own["set"] = [*own.get("set", []), f"after={':'.join(own['after'])}"]
    return submit_recipe(recipe, overrides, own)


def submit_recipe(recipe: Recipe, overrides: dict[str, Any], own: Mapping[str, Any]) -> int:
    """Submit a recipe, or show what would be, as this command's own flags say."""
    site = from_flags(own)
    if fitted := fitted_nodes(recipe, overrides, site.trainer.gpus_per_node):
        print(
            f"hpcrl: note: {shown_flags(fitted)}: nodes of site {site.name} have {site.trainer.gpus_per_node} GPUs",
            file=sys.stderr,
        )
    overrides = site.options(recipe, overrides)
    chain = own.get("chain", 1)
    if chain > 1 and own.get("print"):
        raise UsageError("--print writes the script of one job, and --chain submits several", "leave one of them out")
    site = chained(site, chain)
    by_hand = bool(own.get("print"))  # a script for another place, perhaps
    shown = preview(recipe, overrides, site, packages=can_submit() and not by_hand)
    if by_hand:
        print(script_by_hand(shown, [str(recipe.path), *flag_words(overrides)]), end="")
        return 0
    if own.get("dry-run"):
        _show(shown)
        _note_site(site)
        for options in shown.stages:
            with_shipped_config(options)  # which the checks have taken, too: it says so
        refuse_absent_files(shown)
        return 0
    if can_submit():
        _note_place(shown)
    submission, jobs = submit_new(recipe, overrides, site, chain)
    say_submitted(submission, jobs)
    _note_site(site)
    return 0


def say_submitted(submission: Submission, jobs: Sequence[Any]) -> None:
    """The numbers of its jobs, where the run is, who runs where, and how to look."""
    root, (first, *rest) = submission.job.root, [job.job_id for job in jobs]
    if submission.site.exclude:
        print(f"left out: {', '.join(submission.site.exclude)}")
    chain = f", then {', '.join(rest)}" if rest else ""
    print(f"job {first}{chain}\nrun directory: {root}\n\n{submission.table()}")
    print(f"\nhpcrl status {root}\nhpcrl watch {root}")


#: key of a site -> the command that shows what there is
ASKED = {
    "account": "sacctmgr show assoc user=$USER format=account%30,partition,qos%40",
    "trainer.partition": "sinfo -o '%P %l %D %G'",
    "trainer.gpus_per_node": "sinfo -N -o '%N %G'",
}
PROFILE = """account = "ACCOUNT"
[trainer]
partition = "PARTITION"
gpus_per_node = 8"""


def _note_site(site: SiteProfile) -> None:
    """Say what Slurm was not told because no site is named, how to find it, and how to write it down."""
    lacks = [key for key in ASKED if attrgetter(key)(site) is None]
    if site.name != "default" or not lacks:
        return
    print(f"hpcrl: note: no --site: Slurm's defaults count for {', '.join(lacks)}; see what there is:", file=sys.stderr)
    print("\n".join(f"    {ASKED[key]}" for key in lacks), file=sys.stderr)
    print(f"Write a file mine.toml, and give --site mine.toml:\n\n{PROFILE}", file=sys.stderr)


def _show(shown: Submission) -> None:
    """The plan, the script, the command, and what Slurm says of it where it is here."""
    text = preview_script(shown)
    place = shlex.quote(str(shown.job.root / SCRIPT))
    print(f"{shown.table()}\n\n{text}\n# dry run: hpcrl submit would write this script and call:")
    print(f"# sbatch {place}")
    if can_submit():
        if silent := [finding for finding in responds() if finding.level == "fail"]:
            print(f"# {silent[0].what}: whether it would accept this job is unknown")
            return
        refuse_unfit(shown.request, shown.site)
        verdict = test_only(text, SECONDS)
        if verdict.never:
            raise UsageError(f"Slurm refuses this job: {verdict.text}", verdict.hint)
        print(f"# sbatch --test-only says: {verdict.text}")


def _note_place(shown: Submission) -> None:
    """A note if other nodes may not see the run directory; they say so for certain when the job starts."""
    root = shown.job.root
    parent = next(path for path in (root, *root.parents) if path.exists())
    several = sum(component.nodes for component in shown.request.components) > 1
    finding = file_system(parent, read_system("/proc/self/mounts"), several)
    if finding.level != "ok":
        print(f"hpcrl: note: {finding.what}; {finding.hint}", file=sys.stderr)
