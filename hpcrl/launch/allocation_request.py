"""What a run asks of Slurm: how many nodes, how large, in what layout, so that every stage has its plan.

Invariants: pure functions of options and a site's profile; the hosts that a request will bring, in the order in which
it brings them, hold the plan of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.site import SiteProfile, minutes
from hpcrl.launch.site_nodes import EACH, NODES, shown_flags
from hpcrl.plan import Host, make_plan
from hpcrl.weights.update_backend import transfer_obstacle

CPUS_PER_SLOT = 8  #: cores a node gives for each GPU where the profile does not say
ROLLOUT_CPUS = 8  #: cores of the rollout process on a separate node
FLOOR = 180  #: seconds before the time limit at which a run saves, until its own steps have been measured
STARTUP = 120  #: seconds that a run needs before its first step, at the very least


class Component(msgspec.Struct, frozen=True):
    """One component of a heterogeneous job, or the whole of a homogeneous one.

    Attributes:
        slots: GPUs (or process slots) a node; 0 for the rollout process alone.
        name: key of the site's table for it.
    """

    name: str
    nodes: int
    slots: int
    cpus: int | None


class AllocationRequest(msgspec.Struct, frozen=True):
    """The allocation.

    Attributes:
        margin: seconds before the time limit at which the batch process is to be signalled.
        spares: how many of the first component's nodes, the last of them, only wait until another is lost.
        outlives_nodes: whether the job is to continue without a node that is lost.
    """

    layout: str
    components: tuple[Component, ...]
    margin: int
    spares: int = 0
    outlives_nodes: bool = False

    def hosts(self) -> list[Host]:
        """Stand-ins for the nodes that the job will get, in order."""
        hosts = [Host(f"{c.name}-{i}", c.slots) for c in self.components for i in range(c.nodes)]
        spare = range(self.components[0].nodes - self.spares, self.components[0].nodes)
        return [msgspec.structs.replace(host, spare=number in spare) for number, host in enumerate(hosts)]


# ---- what to ask for


def make_request(stages: Sequence[Options], site: SiteProfile, margin: int | None = None) -> AllocationRequest:
    """The smallest allocation of the site's layout in which every stage has its plan; every node in it, except
    --spares, has work in one of them.

    Args:
        margin: measured in an earlier attempt; None: the site's, or else a floor.

    Raises:
        UsageError: names what does not fit.
    """
    layout, components = _components(stages, site)
    if len(components) == 1 and components[0].name == "trainer" and any(o.num_engines for o in stages):
        layout = "homogeneous"
    if count := max(o.own_sandbox_hosts for o in stages):
        layout, components = _with_sandboxes(layout, components, count, site)
    margin = site.signal_margin or max(margin or 0, FLOOR, *(int(o.stop_timeout) for o in stages))
    spares = max(o.spares for o in stages)
    components[0] = msgspec.structs.replace(components[0], nodes=components[0].nodes + spares)
    outlives = spares > 0 or any(o.own_sandbox_hosts for o in stages)
    request = AllocationRequest(layout, tuple(components), margin, spares, outlives)
    for options in stages:
        make_plan(options, request.hosts(), "request")
        _check_transfer(options, site)
    limit = 60 * minutes(site.time)
    if limit < margin + STARTUP:
        raise UsageError(
            f"--time {site.time} is too short: a run needs {STARTUP} s to start "
            f"and {margin} s to save before the limit",
            f"ask for {-(-(margin + STARTUP) // 60)} minutes or more",
        )
    return request


def _with_sandboxes(
    layout: str, components: list[Component], count: int, site: SiteProfile
) -> tuple[str, list[Component]]:
    """The job with `count` nodes more, for sandboxes: a component of their own, or more of the same where the site
    wants ordinary jobs."""
    if site.layout == "homogeneous":
        return layout, [msgspec.structs.replace(components[0], nodes=components[0].nodes + count)]
    return "heterogeneous", [*components, _component(site, "sandbox", count, 0)]


def _check_transfer(options: Options, site: SiteProfile) -> None:
    """Raise UsageError for a way of the weights that needs GPUs where the site's slots are processes."""
    way = options.weight_transfer
    no_gpus = site.trainer.gpus_per_node == 0
    if no_gpus and way != "auto" and transfer_obstacle(way, cpu=True, one_host=True, shared=True):
        raise UsageError(
            f"--weight-transfer {way} needs GPUs, and the site has none (trainer.gpus_per_node = 0)", "use auto"
        )


def _components(stages: Sequence[Options], site: SiteProfile) -> tuple[str, list[Component]]:
    """The layout and its components: the site's, or else an ordinary job where its nodes are all alike.

    An ordinary job is what Slurm starts first and every tool reads right; and all of its processes run in
    one step, which is what shares a network's identifiers (such as Slingshot's VNI).
    """
    ordinary = any(o.colocate for o in stages) or site.layout == "homogeneous"
    refused: UsageError | None = None
    if ordinary or (site.layout is None and nodes_are_alike(site)):
        try:
            return "homogeneous", _homogeneous(stages, site)
        except UsageError as error:
            if ordinary:
                raise
            refused = error
    try:
        return "heterogeneous", _used(stages, _heterogeneous(stages, site))
    except UsageError as error:
        raise refused or error from None


def nodes_are_alike(site: SiteProfile) -> bool:
    """Whether the profile says what a node has, and the same for engines as for trainers, with no node of the rollout
    process's own."""
    engine = site.engine == type(site.engine)() or site.engine == site.trainer
    return bool(site.trainer.gpus_per_node) and engine and not site.describes("rollout")


def _hold(stages: Sequence[Options], hosts: list[Host]) -> bool:
    """Whether every stage has its plan on these hosts, each of the trainer's nodes a host."""
    try:
        for options in map(_without_sandboxes, stages):
            make_plan(options, hosts, "request")
    except UsageError:
        return False
    return max((o.actor_num_nodes for o in stages if not o.debug_rollout_only), default=0) <= len(hosts)


def _without_sandboxes(options: Options) -> Options:
    """The options as for the other components, whose nodes are counted first."""
    return options.model_copy(update={"sandbox_on": "rollout"}) if options.own_sandbox_hosts else options


def _used(stages: Sequence[Options], components: list[Component]) -> list[Component]:
    """The components without nodes that no stage uses: engines may fit next to the trainer ranks, where nodes have more
    GPUs."""
    request = AllocationRequest("heterogeneous", tuple(components), 0)
    plans = (make_plan(_without_sandboxes(options), request.hosts(), "request") for options in stages)
    used = {host for plan in plans for host in plan.hosts}
    counts = {c.name: sum(f"{c.name}-{i}" in used for i in range(c.nodes)) for c in components}
    return [msgspec.structs.replace(c, nodes=counts[c.name]) for c in components if counts[c.name]]


def _heterogeneous(stages: Sequence[Options], site: SiteProfile) -> list[Component]:
    training = [o for o in stages if not o.debug_rollout_only]
    found = []
    if training:
        each = max(o.actor_num_gpus_per_node for o in training)
        nodes = max(o.actor_num_nodes for o in training)
        found.append(_component(site, "trainer", nodes, site.trainer.gpus_per_node or each))
    wanted = max((o.num_engines * o.rollout_num_gpus_per_engine for o in stages), default=0)
    if wanted:
        found.append(_component(site, "engine", *_engine_nodes(stages, site, wanted)))
    if site.describes("rollout"):
        found.append(Component("rollout", 1, 0, site.rollout.cpus_per_node or ROLLOUT_CPUS))
    return found


def _engine_nodes(stages: Sequence[Options], site: SiteProfile, wanted: int) -> tuple[int, int]:
    """(nodes, slots a node) for `wanted` GPUs of engines; an engine is in one node, or fills several."""
    per_engine = max(o.rollout_num_gpus_per_engine for o in stages if o.num_engines)
    as_trainers = site.trainer.gpus_per_node if site.engine == type(site.engine)() else None
    node = site.engine.gpus_per_node or as_trainers or min(wanted, 8)
    if per_engine > node:
        if per_engine % node:
            raise UsageError(
                f"an engine of --rollout-num-gpus-per-engine {per_engine} does not fill nodes of {node} GPUs",
                "choose a multiple, or set engine.gpus_per_node",
            )
        return wanted // node, node
    usable = node // per_engine * per_engine  # what is left on a node is too little for another engine
    return -(-wanted // usable), node


def _homogeneous(stages: Sequence[Options], site: SiteProfile) -> list[Component]:
    """Nodes of one kind; as few as hold every stage."""
    training = [o for o in stages if not o.debug_rollout_only]
    each = max((o.actor_num_gpus_per_node for o in training), default=1)
    per_engine = max((o.rollout_num_gpus_per_engine for o in stages if o.num_engines), default=1)
    node = site.trainer.gpus_per_node or max(each, min(per_engine, 8))
    if nodes := _fewest(stages, node):
        return [_component(site, "trainer", nodes, node)]
    raise UsageError(f"no number of nodes of {node} GPUs holds this run", _what_would_fit(stages, node))


def _fewest(stages: Sequence[Options], node: int) -> int:
    """How many nodes of `node` GPUs hold every stage, at the least; 0 where no number does."""
    actors = max((o.actor_num_nodes for o in stages if not o.debug_rollout_only), default=0)
    most = actors + max(o.engine_gpus for o in stages)
    counts = range(1, most + 1)
    return next((n for n in counts if _hold(stages, [Host(f"node-{i}", node) for i in range(n)])), 0)


def _what_would_fit(stages: Sequence[Options], node: int) -> str:
    """The smallest change of the options that makes the run fit nodes of so many GPUs, as a hint."""
    for wanted in _changes(stages, node):
        if _fewest([o.model_copy(update=wanted) for o in stages], node):
            return f"give {shown_flags(wanted)}"
    return "set trainer.gpus_per_node of the site to what its nodes have, or change the layout of the run"


def _changes(stages: Sequence[Options], node: int) -> Iterator[dict[str, int]]:
    """Changes of options to try, small ones first: other nodes for the trainers, smaller engines, both."""
    wide = next((o for o in stages if o.actor_num_gpus_per_node > node), None)
    nodes = dict[str, int]()
    if wide and wide.world_size % node == 0:
        nodes = {NODES: wide.world_size // node, EACH: node}
        yield nodes
    sizes = {o.rollout_num_gpus_per_engine for o in stages if o.num_engines}
    for size in range(node, 0, -1):
        if sizes and node % size == 0 and all(o.engine_gpus % size == 0 for o in stages):
            yield {"rollout_num_gpus_per_engine": size}
            yield {**nodes, "rollout_num_gpus_per_engine": size}


def _component(site: SiteProfile, name: str, nodes: int, slots: int) -> Component:
    wish = getattr(site, name)
    cpus = wish.cpus_per_node or (None if site.exclusive else CPUS_PER_SLOT * max(slots, 1))
    return Component(name, nodes, slots, cpus)
