"""What the mixture-of-experts families share: Megatron's settings of the experts, and their tensors' names.

Invariant: only what the model is stands here; how it is trained (auxiliary losses, dispatchers) is set elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.errors import DataError
from hpcrl.models.dense import H, M
from hpcrl.models.family import Config, Rule

#: weights over the chosen experts add up to the scaling factor, in Megatron only if there are several
FEWEST = 2


def settings(config: Config, experts: int, sparse: Sequence[bool]) -> dict[str, Any]:
    """Fields of TransformerConfig: number of experts, and which layers have them.

    Raises:
        DataError: if no layer has any, or if a token goes to more experts than there are.
    """
    chosen = config["num_experts_per_tok"]
    kind = config["model_type"]
    if not any(sparse):
        raise DataError(f"config.json of this {kind} model leaves no layer with experts")
    if not FEWEST <= chosen <= experts:
        raise DataError(
            f"config.json of this {kind} model has num_experts_per_tok = {chosen!r}",
            f"it must be from {FEWEST} to {experts}",
        )
    return {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(has) for has in sparse],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": chosen,
    }


def _experts(fc: int, kind: Any, hf: tuple[str, ...]) -> tuple[Rule, ...]:
    """One of the two linear layers of every expert, under the names of both of Megatron's implementations."""
    names = tuple(f"{H}mlp.experts.{{expert}}.{name}.weight" for name in hf)
    places = (
        f"mlp.experts.local_experts.{{expert}}.linear_fc{fc}.weight",
        f"mlp.experts.linear_fc{fc}.weight{{expert}}",
    )
    return tuple(Rule(M + place, kind, names, layers="experts") for place in places)


ROUTER = Rule(M + "mlp.router.weight", "same", (H + "mlp.gate.weight",), layers="experts")
EXPERTS = (*_experts(1, "gate_up", ("gate_proj", "up_proj")), *_experts(2, "row", ("down_proj",)))
