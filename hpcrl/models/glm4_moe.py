"""GLM-4.5 and later with experts: first layers dense, sigmoid routing with a correction bias, a shared expert.

Half of a head's columns are rotated; norms on queries and keys, and biases, as config.json says.
"""

from __future__ import annotations

from typing import Any

from hpcrl.errors import DataError
from hpcrl.models import dense, moe
from hpcrl.models.dense import H, M
from hpcrl.models.family import Config, Family, Rule, refuse

NEEDED = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "attention_bias",
)
SHARED = M + "mlp.shared_experts."


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    fields = dense.settings(config, needed=NEEDED)
    refuse(config, {"norm_topk_prob": [True]})
    if config["n_shared_experts"] < 1:
        raise DataError("config.json of this glm4_moe model has n_shared_experts = 0", "one at least is supported")
    sparse = [layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"])]
    return (
        fields
        | moe.settings(config, config["n_routed_experts"], sparse)
        | {
            "add_qkv_bias": config["attention_bias"],
            "qk_layernorm": bool(config.get("use_qk_norm", False)),
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
    groups = config.get("n_group", 1)
    best = config.get("topk_group", 1)
    chosen = config["num_experts_per_tok"]
    if groups == 1:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if config["n_routed_experts"] % groups or chosen != 2 * best:
        raise DataError(
            f"config.json of this glm4_moe model has n_group = {groups}, topk_group = {best}, num_experts_per_tok = "
            f"{chosen}",
            "with groups that divide the experts, twice as many experts as groups must be chosen",
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    return dense.gpt(config, share=0.5)


FAMILY = Family(
    model_type="glm4_moe",
    transformer=transformer,
    gpt=gpt,
    rules=(
        *dense.RULES,
        moe.ROUTER,
        Rule(M + "mlp.router.expert_bias", "same", (H + "mlp.gate.e_score_correction_bias",), layers="experts"),
        *moe.EXPERTS,
        Rule(
            SHARED + "linear_fc1.weight",
            "gate_up",
            (H + "mlp.shared_experts.gate_proj.weight", H + "mlp.shared_experts.up_proj.weight"),
            layers="experts",
        ),
        Rule(SHARED + "linear_fc2.weight", "row", (H + "mlp.shared_experts.down_proj.weight",), layers="experts"),
    ),
)
