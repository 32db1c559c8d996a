"""Which ranks of a run are rehearsed: a pure function of the options and the model.

Ranks of one pipeline stage hold parts of the same shapes. Of every stage that no earlier one between the ends is like,
the first and the last rank are rehearsed, whose places differ in all of TP, CP, EP and DP.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.groups import planned
from hpcrl.memory.parameters import Layout, on_stage
from hpcrl.models.family import Config, Family


def stages(options: Options) -> dict[int, int]:
    """rank -> its pipeline stage."""
    return {rank: stage for group in planned(options)["pp"] for stage, rank in enumerate(group)}


def distinct(options: Options, family: Family, config: Config) -> list[int]:
    """The ranks that are rehearsed where none are named."""
    layout = Layout.of(options, family.transformer(config)["num_layers"])
    of_rank = stages(options)
    met: set[tuple[int, int]] = set()
    chosen: list[int] = []
    for stage in range(layout.pp):
        count = on_stage(family, config, layout, stage, options.megatron)
        key = (count.dense, count.expert)
        if 0 < stage < layout.pp - 1:
            if key in met:
                continue
            met.add(key)
        members = sorted(rank for rank, where in of_rank.items() if where == stage)
        chosen += dict.fromkeys((members[0], members[-1]))
    return chosen


def named(text: str, options: Options) -> list[int]:
    """Ranks of --ranks: "all", or numbers with commas.

    Raises:
        UsageError: for a rank that the run does not have.
    """
    if text == "all":
        return list(range(options.world_size))
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--ranks {text}: ranks are numbers with commas", "or all") from None
    if wrong := [rank for rank in found if not 0 <= rank < options.world_size]:
        raise UsageError(f"--ranks {text}: the run has ranks 0 to {options.world_size - 1}, not {wrong[0]}")
    return found
