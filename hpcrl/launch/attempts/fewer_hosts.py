"""What is left of a run on fewer hosts: fewer data-parallel replicas, or fewer engines.  Pure.

Invariants: the model-parallel layout of a replica and the size of an engine stay as they are, and so does the global
batch: each rank computes more of it; the largest run that fits is taken; what cannot be divided so is refused as it is
for a user who asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.options import Options
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import UsageError
from hpcrl.plan import Host, make_plan


def on_fewer(options: Options, hosts: Sequence[Host]) -> Options | None:
    """The options of the largest run that fits these hosts; None if none does.

    Of two that use as many slots the one with more trainer ranks is the larger.
    """
    for smaller in sorted(_smaller(options), key=lambda o: (-(o.trainer_slots + o.engine_gpus), -o.trainer_slots)):
        try:
            check_options(smaller, given=())
            make_plan(smaller, list(hosts), "smaller")
        except UsageError:
            continue
        return smaller
    return None


def _smaller(options: Options) -> Iterator[Options]:
    """Runs with fewer nodes for the trainer, fewer engines, or both."""
    each = options.rollout_num_gpus_per_engine
    for nodes in range(1, options.actor_num_nodes + 1):
        for engines in range(1, options.num_engines + 1) if options.num_engines else (0,):
            if (nodes, engines) != (options.actor_num_nodes, options.num_engines):
                own = {"rollout_num_gpus": engines * each} if options.rollout_num_gpus is not None else {}
                yield options.model_copy(update={"actor_num_nodes": nodes, **own})


def what_changed(before: Options, after: Options) -> str:
    """In words."""
    ranks = f"{after.world_size} instead of {before.world_size} trainer ranks, the global batch as it was"
    engines = f"{after.num_engines} instead of {before.num_engines} engines"
    changed = [ranks if after.world_size != before.world_size else ""]
    changed += [engines if after.num_engines != before.num_engines else ""]
    return ", ".join(filter(None, changed))
