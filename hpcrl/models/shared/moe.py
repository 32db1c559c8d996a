"""What the mixture-of-experts families share: Megatron's settings of the experts, and their tensors' names.

Invariant: only what the model is stands here; how it is trained (auxiliary losses, dispatchers) is set elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.errors import DataError
from hpcrl.models.family import Config, Rule, refuse
from hpcrl.models.shared.dense import H, M

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


#: settings of config.json that `sigmoid_settings` reads
SIGMOID = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
)


def sigmoid_settings(config: Config, sparse: Sequence[bool]) -> dict[str, Any]:
    """Fields of TransformerConfig for experts chosen by sigmoid scores with a correction bias, and shared experts
    (DeepSeek-V3, arXiv:2412.19437).

    Raises:
        DataError: if there are no shared experts, or if the choice is not Megatron's.
    """
    refuse(config, {"norm_topk_prob": [True]})
    if config["n_shared_experts"] < 1:
        raise DataError(
            f"config.json of this {config['model_type']} model has n_shared_experts = 0", "one at least is supported"
        )
    return (
        settings(config, config["n_routed_experts"], sparse)
        | {
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,  # unread with sigmoid; slime's flags for these models say so
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        }
        | _groups(config)
    )


def _groups(config: Config) -> dict[str, Any]:
    """Routing limited to the best groups of experts.

    A group's score is the sum of its best 2 experts here, of its best (chosen / groups) in Megatron: DataError if
    these are not the same.
    """
    groups = config.get("n_group") or 1
    best = config.get("topk_group") or 1
    chosen = config["num_experts_per_tok"]
    if groups == 1:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if config["n_routed_experts"] % groups or chosen != 2 * best:
        raise DataError(
            f"config.json of this {config['model_type']} model has n_group = {groups}, topk_group = {best}, "
            f"num_experts_per_tok = {chosen}",
            "with groups that divide the experts, twice as many experts as groups must be chosen",
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def experts(block: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """The linear layers of every expert.

    Args:
        block: what their names begin with in a checkpoint, before "experts".
        names: of the gate's, the upper and the lower projection.
    """
    return (*_experts(1, "gate_up", block, names[:2]), *_experts(2, "row", block, names[2:]))


def _experts(fc: int, kind: Any, block: str, hf: tuple[str, ...]) -> tuple[Rule, ...]:
    """One of the two linear layers of every expert, under the names of both of Megatron's implementations."""
    names = tuple(f"{block}experts.{{expert}}.{name}.weight" for name in hf)
    places = (
        f"mlp.experts.local_experts.{{expert}}.linear_fc{fc}.weight",
        f"mlp.experts.linear_fc{fc}.weight{{expert}}",
    )
    return tuple(Rule(M + place, kind, names, layers="experts") for place in places)


ROUTER = Rule(M + "mlp.router.weight", "same", (H + "mlp.gate.weight",), layers="experts")
EXPERTS = experts(H + "mlp.", ("gate_proj", "up_proj", "down_proj"))


def shared_expert(hf: str) -> tuple[Rule, Rule]:
    """The two linear layers of the experts that every token meets.

    Args:
        hf: what their names begin with in a checkpoint.
    """
    place = M + "mlp.shared_experts.linear_"
    gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return (
        Rule(f"{place}fc1.weight", "gate_up", gate_up, layers="experts"),
        Rule(f"{place}fc2.weight", "row", (f"{hf}down_proj.weight",), layers="experts"),
    )


#: of `sigmoid_settings`
SIGMOID_RULES = (
    ROUTER,
    Rule(M + "mlp.router.expert_bias", "same", (H + "mlp.gate.e_score_correction_bias",), layers="experts"),
    *EXPERTS,
    *shared_expert(H + "mlp.shared_experts."),
)
