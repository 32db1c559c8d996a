"""Which ranks of a run are rehearsed: a pure function of the options and the model.

Ranks of one pipeline stage hold parts of the same shapes. Of every stage that no earlier one between the ends is like,
the first and the last rank are rehearsed, whose places differ in all of TP, CP, EP and DP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.groups import planned
from hpcrl.models.family import Config, Family
from hpcrl.planning.formulas.parameters import Layout, on_stage


def stages(options: Options) -> dict[int, int]:
    """rank -> its pipeline stage."""
    return {rank: stage for group in planned(options)["pp"] for stage, rank in enumerate(group)}


def like(options: Options, family: Family, config: Config) -> list[int]:
    """Of each pipeline stage the first one that holds the same; the first and the last stage are like no other."""
    layout = Layout.from_options(options, family.transformer(config)["num_layers"])
    met: dict[tuple[float, float], int] = {}
    found = []
    for stage in range(layout.pp):
        count = on_stage(family, config, layout, stage, options.megatron)
        inside = 0 < stage < layout.pp - 1
        found.append(met.setdefault((count.dense, count.expert), stage) if inside else stage)
    return found


def distinct(options: Options, family: Family, config: Config) -> list[int]:
    """The ranks that are rehearsed where none are named."""
    chosen: list[int] = []
    for stage in dict.fromkeys(like(options, family, config)):
        chosen += dict.fromkeys(_ends(options, stage))
    return chosen


def _ends(options: Options, stage: int) -> tuple[int, int]:
    members = sorted(rank for rank, where in stages(options).items() if where == stage)
    return members[0], members[-1]


@dataclass(frozen=True)
class Boundary:
    """Where one stage sends to the next, told by ranks of stages that are like them.

    Attributes:
        sender, to: a rank, and the one of the next stage that it sends to.
        receiver, source: a rank, and the one of the stage before it that it receives from.
        stages: which two.
    """

    sender: int
    to: int
    receiver: int
    source: int
    stages: tuple[int, int]


def boundaries(options: Options, same: list[int]) -> list[Boundary]:
    """Those of the first and of the last rank of each stage.

    Args:
        same: what `like` says.
    """
    lines: Mapping[int, list[int]] = {rank: list(group) for group in planned(options)["pp"] for rank in group}
    found = []
    for stage in range(len(same) - 1):
        before, after = same[stage], same[stage + 1]
        for a, b in dict.fromkeys(zip(_ends(options, before), _ends(options, after), strict=True)):
            found.append(Boundary(a, lines[a][before + 1], b, lines[b][after - 1], (stage, stage + 1)))
    return found


def same_rows(options: Options) -> Callable[[int, int, str], bool]:
    """Whether two ranks train on as many rows in their groups of a kind: ranks of other context places hold other rows
    of each sample, of which more or fewer are trained on, and need agree in the groups that both are in alone."""
    groups = planned(options)
    place = {rank: where for group in groups["cp"] for where, rank in enumerate(group)}

    def same(one: int, two: int, kind: str) -> bool:
        if place[one] == place[two] or kind not in groups:  # others are called by their ranks: both are in it
            return True
        return any(one in group and two in group for group in groups[kind])

    return same


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
