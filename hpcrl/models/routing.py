"""Which layers of a model route tokens to experts: what a replay of their choices is made for.

Invariant: replay is asked of a model with experts alone; a dense one is refused before anything of it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.models.family import Config, find_family

if TYPE_CHECKING:  # a fifth of the time in which a command or a launcher starts, and neither has an array
    import numpy as np

R2 = "--use-routing-replay"
R3 = "--use-rollout-routing-replay"


@dataclass(frozen=True)
class Routing:
    """The layers of a model in which each token chooses among experts.

    Attributes:
        layers: the numbers of those with experts, from 0.
        of: all layers.
        experts: of each.
        chosen: of them for a token.
    """

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
    def dtype(self) -> np.dtype:
        """In which `Sample.rollout_routed_experts` holds the number of an expert."""
        import numpy as np

        return np.dtype("u1") if self.experts <= 256 else np.dtype("<u2")

    def column(self, experts: np.ndarray) -> np.ndarray:
        """Experts [tokens, layers with experts, experts a token] of any integers as that column."""
        import numpy as np

        return np.ascontiguousarray(experts, self.dtype).view(np.uint8)

    def read(self, column: np.ndarray) -> np.ndarray:
        """Such a column [tokens, layers, bytes] as experts [tokens, layers, experts a token], a view.

        Raises:
            DataError: if it is of other layers or of another number of experts, or names one that does not exist.
        """
        wanted = (len(self.layers), self.chosen * self.dtype.itemsize)
        if column.shape[1:] != wanted:
            raise DataError(
                f"the samples have {column.shape[1]} layers of {column.shape[2]} bytes of routed experts, this model "
                f"{wanted[0]} of {wanted[1]}",
                "engine and trainer must have the same --hf-checkpoint",
            )
        found = column.view(self.dtype)
        if found.size and int(found.max()) >= self.experts:
            raise DataError(f"the samples name expert {int(found.max())}, the model has {self.experts} in a layer")
        return found


def replay_flag(options: Options) -> str:
    """The flag that asks for replay; "" where none does."""
    return R3 if options.use_rollout_routing_replay else R2 if options.use_routing_replay else ""


def find_routing(options: Options, config: Config) -> Routing:
    """Of the model of --hf-checkpoint, whose config.json this is.

    Raises:
        UsageError: for a dense one, if a replay of its choices is asked for.
        DataError: for a bad config.json.
    """
    assert options.hf_checkpoint is not None, "checked by rules/run.py"
    found = Routing.of_fields(find_family(config, options.hf_checkpoint).transformer(config))
    if found is None:
        flag = replay_flag(options)
        raise UsageError(
            f"{flag} replays the choice of experts, and the {config.get('model_type')} model in "
            f"{options.hf_checkpoint} has none",
            f"leave {flag} out, or give --hf-checkpoint a mixture-of-experts model",
        )
    return found
