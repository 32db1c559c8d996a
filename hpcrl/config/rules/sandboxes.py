"""What options of sandboxes go together with: pure functions of the options of `sections/sandboxes.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import UsageError


def check_sandboxes(o: Options) -> None:
    """Raise UsageError for places and numbers of sandboxes that cannot be."""
    check_stages_hosts((o,))
    if o.sandbox_on == "engines" and o.needs_engines and not o.num_engines:
        raise UsageError("--sandbox-on engines: this run starts no engine", "give --sandbox-on nodes, or leave it out")


def check_stages_hosts(stages: Sequence[Options]) -> None:
    """Raise UsageError if a job has nodes for sandboxes in one of its stages, and replaces hosts in one."""
    replacing = next((o for o in stages if o.spares), None)
    if replacing and any(o.own_sandbox_hosts for o in stages):
        raise UsageError(
            f"--sandbox-on nodes with --spares {replacing.spares}: a host that is lost would be replaced by one of "
            "another kind",
            "leave it out, or give --sandbox-on engines",
        )


def may_use_sandboxes(o: Options) -> bool:
    """Whether functions of the user's are called where responses are made and graded: nothing else uses sandboxes."""
    users = (name for name, point in POINTS.items() if point.role != "trainer")
    return o.eval_config is not None or any(paths_of(o, name) for name in users)


def inert_in_sandboxes(o: Options) -> Iterator[tuple[str, str]]:
    """Options of sandboxes without effect, several in one string -> why."""
    every = "sandbox_on sandbox_num_nodes sandbox_kind"
    if not may_use_sandboxes(o):
        yield every, "no custom function is given, and nothing else uses sandboxes"
    elif not o.needs_engines:
        yield every, "nothing is sampled"
    if o.sandbox_on != "nodes":
        yield "sandbox_num_nodes", "--sandbox-on nodes is not given"
