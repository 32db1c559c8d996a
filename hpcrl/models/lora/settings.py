"""How large an adapter is, by how much it counts, and which matrices have one.

Invariant: one record, made of the options, is what a plan, a rank, an engine and a file go by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from math import sqrt
from typing import Any

from hpcrl.config.options import Options

RECORD = "adapter.json"  #: of a checkpoint: the settings of its adapter, and what its base is


@dataclass(frozen=True)
class LoraSettings:
    """The adapter of a run.

    Attributes:
        rank: of A and B.
        alpha: `scale` is made of it.
        dropout: share of an adapter's inputs that are left out in training.
        targets, excluded: see `rules.adapted`.
        shared_inputs: the matrices that Megatron holds as one (queries, keys and values; gate and up) have one A
            together (--lora-type lora), else each its own, as PEFT's have (canonical_lora).
        rank_stabilized: alpha is divided by the root of the rank (rsLoRA, arXiv:2312.03732).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    excluded: tuple[str, ...] = ()
    shared_inputs: bool = False
    rank_stabilized: bool = False

    @classmethod
    def of_plain(cls, fields: Mapping[str, Any]) -> LoraSettings:
        """From what `dataclasses.asdict` gave and JSON has carried; further keys are left out.

        Raises:
            KeyError, TypeError: if it is something else.
        """
        own = {field.name: fields[field.name] for field in dataclass_fields(cls)}
        return cls(**own | {name: tuple(own[name]) for name in ("targets", "excluded")})

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)


def lora_settings(options: Options) -> LoraSettings | None:
    """Those of a run; None for one that trains all weights."""
    if not options.lora_rank:
        return None
    return LoraSettings(
        options.lora_rank,
        options.lora_alpha,
        options.lora_dropout,
        tuple(options.target_modules),
        tuple(options.exclude_modules),
        options.lora_type == "lora",
        options.use_rslora,
    )
