"""What to ask a scheduler for, so that every stage of a recipe finds its slots: a pure function of options and site.

Invariant: the hosts that a Request will bring, in the order that it brings them, hold the plan of every stage; what
cannot fit is refused here, before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.site import Site, minutes
from hpcrl.plan import Host, make_plan
from hpcrl.weights.transports import TransportConditions, find_way

CPUS_PER_SLOT = 8  #: cores a node gives for each GPU where the profile does not say
ROLLOUT_CPUS = 8  #: cores of the rollout process on a node of its own
FLOOR = 180  #: seconds before the time limit at which a run saves, until its own steps have been measured
STARTUP = 120  #: seconds that a run needs before its first step, at the very least


class Component(msgspec.Struct, frozen=True):
    """One component of a heterogeneous job, or the whole of a homogeneous one.

    slots: GPUs (or process slots) a node; 0 for the rollout process alone.  name: key of the site's table for it.
    """

    name: str
    nodes: int
    slots: int
    cpus: int | None


class Request(msgspec.Struct, frozen=True):
    """The allocation.  margin: seconds before the time limit at which the batch process is to be signalled."""

    layout: str
    components: tuple[Component, ...]
    margin: int

    def hosts(self) -> list[Host]:
        """Stand-ins for the nodes that the job will get, in order."""
        return [Host(f"{c.name}-{i}", c.slots) for c in self.components for i in range(c.nodes)]


def make_request(stages: Sequence[Options], site: Site, margin: int | None = None) -> Request:
    """The smallest allocation of the site's layout in which every stage has its plan; no node in it is idle in all of
    them.

    margin: measured in an earlier attempt; None: the site's, or else a floor.  UsageError names what does not fit.
    """
    layout = (
        "homogeneous"
        if any(o.colocate for o in stages) or _one_node_holds(stages, site)
        else site.layout or "heterogeneous"
    )
    components = _homogeneous(stages, site) if layout == "homogeneous" else _used(stages, _heterogeneous(stages, site))
    if len(components) == 1 and components[0].name == "trainer" and any(o.num_engines for o in stages):
        layout = "homogeneous"
    margin = site.signal_margin or max(margin or 0, FLOOR, *(int(o.stop_timeout) for o in stages))
    request = Request(layout, tuple(components), margin)
    for options in stages:
        make_plan(options, request.hosts(), "request")
        _check_transfer(options, site)
    limit = 60 * minutes(site.time)
    if limit < margin + STARTUP:
        raise UsageError(
            f"--time {site.time} is too short: a run needs {STARTUP} s to start and {margin} s to save before the limit",
            f"ask for {-(-(margin + STARTUP) // 60)} minutes or more",
        )
    return request


def _check_transfer(options: Options, site: Site) -> None:
    """UsageError for a way of the weights that needs GPUs where the site's slots are processes."""
    way = options.weight_transfer
    nowhere = TransportConditions(cpu=True, one_host=True, colocate=True)
    if site.trainer.gpus_per_node == 0 and way != "auto" and find_way(way).obstacle(nowhere):
        raise UsageError(
            f"--weight-transfer {way} needs GPUs, and the site has none (trainer.gpus_per_node = 0)", "use auto"
        )


def _one_node_holds(stages: Sequence[Options], site: Site) -> bool:
    """Whether one of the trainer's nodes is known to hold every stage, and the site asks for nothing else.

    Known: `trainer.gpus_per_node` says what a node has.  Asks: for a layout, for a node of the rollout process's own,
    or for other nodes for engines than for trainers.
    """
    apart = site.describes("engine") and site.engine != site.trainer
    if site.layout or apart or site.describes("rollout") or not site.trainer.gpus_per_node:
        return False
    return _hold(stages, [Host("node-0", site.trainer.gpus_per_node)])


def _hold(stages: Sequence[Options], hosts: list[Host]) -> bool:
    """Whether every stage has its plan on these hosts, each of the trainer's nodes a host."""
    try:
        for options in stages:
            make_plan(options, hosts, "request")
    except UsageError:
        return False
    return max((o.actor_num_nodes for o in stages if not o.debug_rollout_only), default=0) <= len(hosts)


def _used(stages: Sequence[Options], components: list[Component]) -> list[Component]:
    """The components without nodes that no stage uses: engines may fit beside the trainer ranks, where nodes have more
    GPUs."""
    request = Request("heterogeneous", tuple(components), 0)
    used = {host for options in stages for host in make_plan(options, request.hosts(), "request").hosts}
    counts = {c.name: sum(f"{c.name}-{i}" in used for i in range(c.nodes)) for c in components}
    return [msgspec.structs.replace(c, nodes=counts[c.name]) for c in components if counts[c.name]]


def _heterogeneous(stages: Sequence[Options], site: Site) -> list[Component]:
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


def _engine_nodes(stages: Sequence[Options], site: Site, wanted: int) -> tuple[int, int]:
    """(nodes, slots a node) for `wanted` GPUs of engines; an engine lies in one node, or fills several."""
    per_engine = max(o.rollout_num_gpus_per_engine for o in stages if o.num_engines)
    node = site.engine.gpus_per_node or min(wanted, 8)
    if per_engine > node:
        if per_engine % node:
            raise UsageError(
                f"an engine of --rollout-num-gpus-per-engine {per_engine} does not fill nodes of {node} GPUs",
                "choose a multiple, or set engine.gpus_per_node",
            )
        return wanted // node, node
    usable = node // per_engine * per_engine  # what is left on a node is too little for another engine
    return -(-wanted // usable), node


def _homogeneous(stages: Sequence[Options], site: Site) -> list[Component]:
    """Nodes of one kind; as few as hold every stage."""
    training = [o for o in stages if not o.debug_rollout_only]
    each = max((o.actor_num_gpus_per_node for o in training), default=1)
    actors = max((o.actor_num_nodes for o in training), default=0)
    per_engine = max((o.rollout_num_gpus_per_engine for o in stages if o.num_engines), default=1)
    node = site.trainer.gpus_per_node or max(each, min(per_engine, 8))
    most = actors + max(o.engine_gpus for o in stages)
    for nodes in range(1, most + 1):
        if _hold(stages, [Host(f"node-{i}", node) for i in range(nodes)]):
            return [_component(site, "trainer", nodes, node)]
    raise UsageError(
        f"no number of nodes of {node} GPUs holds this run",
        "set trainer.gpus_per_node of the site, or --rollout-num-gpus-per-engine to divide a node",
    )


def _component(site: Site, name: str, nodes: int, slots: int) -> Component:
    wish = getattr(site, name)
    cpus = wish.cpus_per_node or (None if site.exclusive else CPUS_PER_SLOT * max(slots, 1))
    return Component(name, nodes, slots, cpus)
