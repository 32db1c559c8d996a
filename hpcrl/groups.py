"""Which ranks form which parallel group: a pure function of the sizes, before any process is started.

The order is Megatron-core's default, tp-cp-ep-dp-pp: tensor-parallel neighbours are consecutive ranks, pipeline stages
are farthest apart.  Experts have their own layout over the same ranks: etp-ep-edp-pp.

Invariant: the groups of one kind are a partition of all ranks, and equal those that Megatron-core builds.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.plan import Plan

Groups = list[list[int]]


def layout(world: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None) -> dict[str, Groups]:
    """kind -> groups of ranks, for the kinds tp, cp, dp, dp-cp (one gradient reduction), pp, and ep, etp, edp with
    experts.

    etp None: the same as tp.

    Raises:
        UsageError: if the sizes do not divide the world.
    """
    etp = tp if etp is None else etp
    dense = {"tp": tp, "cp": cp, "dp": _rest(world, {"TP": tp, "CP": cp, "PP": pp}), "pp": pp}
    found = {kind: groups(dense, (kind,)) for kind in dense} | {"dp-cp": groups(dense, ("cp", "dp"))}
    if ep > 1:
        experts = {"etp": etp, "ep": ep, "edp": _rest(world, {"ETP": etp, "EP": ep, "PP": pp}), "pp": pp}
        found |= {kind: groups(experts, (kind,)) for kind in ("etp", "ep", "edp")}
    return found


def _rest(world: int, sizes: Mapping[str, int]) -> int:
    product = math.prod(sizes.values())
    if world % product:
        spelled = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(
            f"{world} ranks cannot be divided by {spelled} = {product}", "choose sizes whose product divides the ranks"
        )
    return world // product


def groups(sizes: Mapping[str, int], kinds: Sequence[str]) -> Groups:
    """Ranks that differ in `kinds` only, in rank order.

    Args:
        sizes: from the fastest to the slowest changing coordinate.
    """
    steps = dict(zip(sizes, itertools.accumulate(sizes.values(), operator.mul, initial=1), strict=False))
    offsets = lambda names: sorted(  # noqa: E731
        sum(at * steps[name] for name, at in zip(names, place, strict=True))
        for place in itertools.product(*(range(sizes[name]) for name in names))
    )
    inside = offsets(list(kinds))
    return [[first + offset for offset in inside] for first in offsets([name for name in sizes if name not in kinds])]


def planned(options: Options) -> dict[str, Groups]:
    """The layout that the options ask for."""
    return layout(
        options.world_size,
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
        options.expert_model_parallel_size,
        options.expert_tensor_parallel_size,
    )


def describe(options: Options, plan: Plan, every: bool = False) -> str:
    """The groups as text, a line for each kind of more than one rank.

    Args:
        every: a line for each group instead, with its ranks and the hosts that it spans.
    """
    if options.debug_rollout_only:
        return "nothing is trained: no groups, and no weights are sent"
    lines = ["group  ranks"] if every else []
    for kind, members in planned(options).items():
        if (size := len(members[0])) == 1:
            continue
        hosts = [list(dict.fromkeys(plan.trainers[rank].host for rank in group)) for group in members]
        if every:
            rows = zip(members, hosts, strict=True)
            lines += [f"{kind:5}  {','.join(map(str, group))}  on {', '.join(names)}" for group, names in rows]
        else:
            span = f"over {most} hosts" if (most := max(map(len, hosts))) > 1 else "inside one host"
            stride = members[0][1] - members[0][0]
            lines.append(f"{kind + ':':6} {len(members)} groups of {size}, stride {stride}, each {span}")
    return "\n".join(lines) if len(lines) > every else "every group is one rank"
