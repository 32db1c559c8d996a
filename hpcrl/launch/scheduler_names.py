"""Which scheduler a name means: the one place that names the rooms of schedulers.

hpcrl's own are in SCHEDULERS.  An installed package adds one as an entry point of the group "hpcrl.schedulers":

    [project.entry-points."hpcrl.schedulers"]
    pbs = "hpcrl_pbs.scheduler:Pbs"

Invariant: a scheduler is found by the name that a site's profile or a job.json gives, and nothing else of these files
is ever imported.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from hpcrl.errors import UsageError

DEFAULT = "slurm"
GROUP = "hpcrl.schedulers"
#: name -> module:class, an implementation of hpcrl.launch.scheduler.Scheduler
SCHEDULERS = {"slurm": "hpcrl.slurm.scheduler:Slurm"}


def find_scheduler(name: str) -> type[Any]:
    """The class of the scheduler of that name (a hpcrl.launch.scheduler.Scheduler).

    Raises:
        UsageError: lists those that there are if it is not one of them, or it cannot be loaded.
    """
    place = SCHEDULERS.get(name) or _installed().get(name)
    if place is None:
        from hpcrl.config.setting_names import nearest

        names = [*SCHEDULERS, *_installed()]
        close = nearest(name, names)
        raise UsageError(
            f"scheduler {name}: there is no such scheduler",
            f"did you mean {close}?" if close else f"there are {', '.join(names)}",
        )
    module, _, kind = place.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"scheduler {name} cannot be loaded: {error}", f"fix or remove the package that holds {place}"
        ) from error


@cache
def _installed() -> dict[str, str]:
    """The schedulers that installed packages add: name -> module:class."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}
