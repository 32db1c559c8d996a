"""A command on one node of a site without a batch script: the srun that waits for the node, and shows what it says.

Invariants: inside a job it is a step of that job, and else a job of its own, with the account and the partition that
the site's profile has; values of the profile reach the shell quoted.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpcrl.launch.allocation_request import Component
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm.job_script import task_python
from hpcrl.launch.slurm.submit import component_options

CPUS = 2  #: cores where nothing says how many
MOST = 16  #: cores that are asked for at most, where the profile has a node's


def on_one_node(site: SiteProfile, arguments: Sequence[str], seconds: float, cpus: int | None = None) -> list[str]:
    """The command that runs hpcrl with `arguments` there.

    Args:
        seconds: that it may take.
        cpus: how many cores; None: those of the profile, MOST at most.
    """
    name = "rollout" if site.describes("rollout") else "trainer"
    cores = cpus or min(getattr(site, name).cpus_per_node or CPUS, MOST)
    more, command = site.wrap(["bash", "-c", _script(site, arguments)], (str(Path.cwd()),))
    words = ["srun", "--unbuffered", "--input=none", "--cpu-bind=none", "--export=ALL", "--mpi=none"]
    if "SLURM_JOB_ID" in os.environ:
        most = re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "2(x4)": of four nodes two each
        cores = min(cores, int(most[0])) if most and not cpus else cores
        place = ["--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}"]
    else:
        options = component_options(Component(name, 1, 0, cores), site)
        minutes = max(1, round(seconds / 60))
        place = [f"--{option}" for option in options] + [f"--time={minutes}", "--job-name=hpcrl", "--ntasks=1"]
    return [*words, *place, *more, *command]


def _script(site: SiteProfile, arguments: Sequence[str]) -> str:
    """What the node's shell is given: modules, the site's own lines, its environment, and the command."""
    lines = [f"module load {shlex.join(site.modules)} || exit 1"] if site.modules else []
    lines += site.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.env.items()]
    python = site.python or task_python(site)
    return "\n".join([*lines, shlex.join(["exec", python, "-m", "hpcrl", *arguments])])
