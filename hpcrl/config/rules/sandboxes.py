"""What options of sandboxes go together with: pure functions of the options of `sections/sandboxes.py`."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import UsageError


def check_sandboxes(o: Options) -> None:
    """Raise UsageError for sandboxes on engines' nodes where what is sampled comes from other engines alone."""
    if o.sandbox_on == "engines" and o.needs_engines and not o.num_engines:
        raise UsageError("--sandbox-on engines: this run starts no engine", "give --sandbox-on nodes, or leave it out")


def inert_in_sandboxes(o: Options) -> Iterator[tuple[str, str]]:
    """Options of sandboxes without effect, several in one string -> why."""
    users = (name for name, point in POINTS.items() if point.role != "trainer")
    if not any(paths_of(o, name) for name in users) and not o.eval_config:
        every = "sandbox_on sandbox_num_nodes sandbox_cpus sandbox_kind sandbox_warm sandbox_most"
        yield every, "no custom function is given, and nothing else uses sandboxes"
    if o.sandbox_on != "nodes":
        yield "sandbox_num_nodes", "--sandbox-on nodes is not given"
    if o.sandbox_on == "rollout":
        yield "sandbox_cpus", "sandboxes of the rollout process's machine share its cores"
