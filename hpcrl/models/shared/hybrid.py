"""What Qwen3-Next and Qwen3.5 share: most layers are gated delta nets, the others attention with an output gate.

Norms have zero-centred weights (1 + w), except the one behind the delta rule; the first quarter of a head's columns is
rotated.  What a delta net computes is in `hpcrl/trainer/megatron`.

Invariant: as in `dense.py`, whatever of the common settings is not carried over is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcrl.errors import DataError
from hpcrl.models.family import Config, Rule, refuse
from hpcrl.models.shared import dense, moe
from hpcrl.models.shared.dense import H, M

NEEDED = (
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
SHARE = 0.25  #: of a head's columns that are rotated, where config.json does not say
CHUNK = 64  #: rows of a sequence that the delta rule solves together
KINDS = {"linear_attention": 1, "full_attention": 0}
#: tensors of published models that take no part in the model of text: layers for further tokens, and the vision part
IGNORED = (r".*rotary_emb\.inv_freq", r"mtp\..*", r"model\.visual\..*")
#: what slime's scripts say in addition to fields of TransformerConfig
FACTS = {
    "apply_layernorm_1p": True,
    "experimental_attention_variant": "gated_delta_net",
}


def settings(config: Config, *, needed: Sequence[str] = ()) -> dict[str, Any]:
    """config.json -> fields of TransformerConfig of the layers' attention and norms; dense MLPs."""
    plain = {name: value for name, value in config.items() if name != "layer_types"}
    fields = dense.settings(plain, needed=(*NEEDED, *needed))
    refuse(config, {"attention_bias": [False], "attn_output_gate": [True]})
    sizes = {name: config[name] for name in NEEDED if name.startswith("linear_")}
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if not all(type(size) is int and size > 0 for size in sizes.values()) or values % keys:
        raise DataError(
            f"config.json of this {config['model_type']} model has linear_num_value_heads = {values!r} and "
            f"linear_num_key_heads = {keys!r}",
            "the first must be a multiple of the second, and all sizes of linear attention above 0",
        )
    return (
        fields
        | sizes
        | {
            "qk_layernorm": True,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "linear_attention_freq": _linear(config),
        }
    )


def _linear(config: Config) -> list[int]:
    """1 for each layer with a delta net, 0 for each with softmax attention."""
    layers = config["num_hidden_layers"]
    period = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= KINDS.keys():
        raise DataError(
            f"config.json of this {config['model_type']} model has layer_types that are not one of "
            f"{', '.join(KINDS)} for each of {layers} layers"
        )
    return [KINDS[kind] for kind in kinds]


def experts(config: Config, sparse: Sequence[bool], normed: bool) -> dict[str, Any]:
    """Fields of TransformerConfig: softmax routing, and a shared expert with a gate.

    Args:
        sparse: which layers have experts.
        normed: whether the weights of a token's experts add up to 1.
    """
    return moe.settings(config, config["num_experts"], sparse) | {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normed,
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    return dense.gpt(config, share=SHARE)


# ---- names

A = M + "self_attention."
L = H + "linear_attn."


def _delta(projection: Rule) -> tuple[Rule, ...]:
    """The tensors of a delta net."""
    found = (
        Rule(A + "in_proj.layer_norm_weight", "same", (H + "input_layernorm.weight",)),
        projection,
        Rule(A + "conv1d.weight", "delta_conv", (L + "conv1d.weight",)),
        Rule(A + "dt_bias", "column", (L + "dt_bias",)),
        Rule(A + "A_log", "column", (L + "A_log",)),
        Rule(A + "out_norm.weight", "same", (L + "norm.weight",)),
        Rule(A + "out_proj.weight", "row", (L + "out_proj.weight",)),
    )
    return tuple(replace(rule, attention="linear") for rule in found)


#: the input projection in two tensors, and in four
TOGETHER = Rule(A + "in_proj.weight", "delta_in", (L + "in_proj_qkvz.weight", L + "in_proj_ba.weight"))
APART = Rule(A + "in_proj.weight", "delta_in_apart", tuple(f"{L}in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")))


def rules(projection: Rule) -> tuple[Rule, ...]:
    """All tensors but those of experts."""
    attention = []
    for rule in dense.ATTENTION:
        if rule.kind == "qkv":
            rule = replace(rule, kind="gated_qkv")
        attention.append(replace(rule, attention="full") if "self_attention." in rule.megatron else rule)
    return (*dense.EMBEDDINGS, *attention, *_delta(projection), *dense.MLP)


EXPERTS = (
    moe.ROUTER,
    *moe.EXPERTS,
    *moe.shared_expert(H + "mlp.shared_expert."),
    Rule(M + "mlp.shared_experts.gate_weight", "same", (H + "mlp.shared_expert_gate.weight",), layers="experts"),
)
