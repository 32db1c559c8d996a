"""Which layers of a model route tokens to experts: what a replay of their choices is made for.

Invariant: replay is asked of a model with experts alone; a dense one is refused before anything of it is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.model_files.config_json import read_config
from hpcrl.models.family import find_family

R2, R3 = "--use-routing-replay", "--use-rollout-routing-replay"


@dataclass(frozen=True)
class Routing:
    """layers: the numbers of those with experts, from 0; of: all layers; experts: of each; chosen: of them for a token."""

    layers: tuple[int, ...]
    of: int
    experts: int
    chosen: int

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Routing | None:
        """From fields of Megatron's TransformerConfig (`Family.transformer`); None for a dense model."""
        if not fields.get("num_moe_experts"):
            return None
        layers = tuple(number for number, has in enumerate(fields["moe_layer_freq"]) if has)
        return cls(layers, fields["num_layers"], fields["num_moe_experts"], fields["moe_router_topk"])

    @property
    def dtype(self) -> str:
        """The narrowest of numpy's types that holds the number of any expert."""
        return "uint8" if self.experts <= 256 else "uint16"


def replay_flag(options: Options) -> str:
    """The flag that asks for replay; "" where none does."""
    return R3 if options.use_rollout_routing_replay else R2 if options.use_routing_replay else ""


def find_routing(options: Options) -> Routing:
    """Of the model of --hf-checkpoint.  UsageError for a dense one, whose replay is asked for; DataError for a bad config.json."""
    flag = replay_flag(options)
    assert options.hf_checkpoint is not None, "checked by option_rules.py"
    config = read_config(options.hf_checkpoint)
    found = Routing.of_fields(find_family(config, options.hf_checkpoint).transformer(config))
    if found is None:
        raise UsageError(
            f"{flag} replays the choice of experts, and the {config.get('model_type')} model in {options.hf_checkpoint} has none",
            f"leave {flag} out, or give --hf-checkpoint a mixture-of-experts model",
        )
    return found


def check_routing(options: Options) -> None:
    """UsageError if replay is asked of a dense model; nothing where its directory is not (yet) to be read from here."""
    if replay_flag(options):
        with contextlib.suppress(DataError):
            find_routing(options)
