"""Every plugin point: which option takes the dotted path of an own function, who calls it, and with what.

Invariant: this table is the one place that says how an own function is called; each role loads all of its points when it starts
(`load_points`), so a wrong path or signature ends the run before any engine is waited for.  docs/customise.md has a row and a
tested example for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.algorithm_files import is_path
from hpcrl.config.dotted_path import load_class, load_function
from hpcrl.config.options import Options

Role = Literal["rollout", "grading", "trainer"]


@dataclass(frozen=True)
class Point:
    """role: whose process calls it; parameters: with what, in order; keywords: by name besides; methods: of a class, with theirs."""

    role: Role
    parameters: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] | None = None

    def load(self, path: str, flag: str) -> Callable[..., Any]:
        """The function or class at `path`.  UsageError if it cannot be used so."""
        if self.methods is not None:
            return load_class(path, flag, self.parameters, self.methods)
        return load_function(path, flag, self.parameters, self.keywords)


#: option -> how it is called; where an option may also be a name, a dotted path alone is meant here
POINTS: dict[str, Point] = {
    "custom_rm_path": Point("grading", ("options", "sample")),
    "rm_type": Point("grading", ("options", "sample")),
    "advantage_estimator": Point("trainer", ("batch", "options")),
    "pg_loss_type": Point("trainer", ("tokens", "options")),
    "custom_tis_function_path": Point("trainer", ("tokens", "options")),
    "kl_loss_type": Point("trainer", ("difference", "ratio")),
    "custom_loss_function_path": Point("trainer", ("tokens", "options")),
    "custom_pg_loss_reducer_function_path": Point("trainer", ("counts", "options")),
}


def spelled(name: str) -> str:
    """An option as an error names it."""
    return "--" + name.replace("_", "-")


def paths_of(options: Options, name: str) -> list[str]:
    """The dotted paths that an option was given: none, one or several."""
    value = getattr(options, name)
    values = value if isinstance(value, list) else [value] if value else []
    return [path.partition(":")[0] for path in values if is_path(path)]


def load_own(name: str, path: str) -> Callable[..., Any]:
    """The function at `path`, given to the option `name`.  UsageError if it cannot be used there."""
    return POINTS[name].load(path, spelled(name))


def load_points(options: Options, role: Role) -> dict[str, list[Callable[..., Any]]]:
    """Option -> its functions, of every point of a role that is in use.  UsageError for the first that cannot be used."""
    return {
        name: [load_own(name, path) for path in paths_of(options, name)]
        for name, point in POINTS.items()
        if point.role == role and paths_of(options, name)
    }
