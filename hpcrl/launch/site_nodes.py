"""A recipe's trainer nodes, as a site has them: as many GPUs in all, on nodes of another size.

Invariant: pure functions.  The world size stays, and with it every parallel layout; what a flag says stays as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.config.stage_flags import flags_of, stage_flag

NODES, EACH = "actor_num_nodes", "actor_num_gpus_per_node"


def fitted_nodes(recipe: Recipe, flags: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """The options, by stage, that put the recipe's trainers on nodes of `gpus` GPUs; {} where they fit as they are.

    A stage is left alone whose nodes a flag sets, or whose nodes do not divide so.
    """
    found: dict[str, Any] = {}
    for stage in recipe.stages if gpus else ():
        own = flags_of(flags, stage.name)
        values = {**recipe.values, **stage.values}
        nodes, each = (values.get(name, Options.model_fields[name].default) for name in (NODES, EACH))
        if NODES in own or EACH in own or each <= gpus or nodes * each % gpus:
            continue
        prefix = f"{stage.name}." if stage.name else ""
        found |= {f"{prefix}{NODES}": nodes * each // gpus, f"{prefix}{EACH}": gpus}
    return found


def shown_flags(options: Mapping[str, Any]) -> str:
    """Options as a command line has them: --actor-num-nodes 16 --actor-num-gpus-per-node 4."""
    split = ((*name.rpartition("."), value) for name, value in options.items())
    return " ".join(f"{stage_flag(stage, option)} {value}" for stage, _, option, value in split)
