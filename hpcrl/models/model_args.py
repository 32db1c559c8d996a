"""What a user's Megatron flags say of the model, compared with what its config.json says.

The flags are not needed: the model is built from config.json.  slime's recipes give them all the same (MODEL_ARGS), and
a wrong one there is a mistake worth an error.

Invariant: a flag that describes the architecture either agrees with config.json or is a UsageError that names it, its
value and config.json's; none of them reaches Megatron.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config.passthrough import as_flag
from hpcrl.errors import UsageError

#: fields that change the architecture -> what they are in a model that has no such thing
WITHOUT: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "beta_fast": None,
    "beta_slow": None,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "is_hybrid_model": False,
    "kv_lora_rank": None,
    "linear_attention_freq": None,
    "layernorm_zero_centered_gamma": False,
    "moe_apply_probs_on_input": False,
    "moe_ffn_hidden_size": None,
    "moe_latent_size": None,
    "moe_layer_freq": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": None,
    "moe_router_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "moe_shared_expert_intermediate_size": None,
    "mrope_section": None,
    "mscale": None,
    "mscale_all_dim": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "num_moe_experts": None,
    "original_max_position_embeddings": None,
    "post_mlp_layernorm": False,
    "post_self_attn_layernorm": False,
    "q_lora_rank": None,
    "qk_head_dim": None,
    "qk_l2_norm": False,
    "qk_pos_emb_head_dim": None,
    "rope_scaling": False,
    "rope_scaling_factor": 1.0,
    "rope_type": None,
    "rotary_scaling_factor": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "v_head_dim": None,
    "window_attn_skip_freq": None,
    "window_size": None,
}
#: what Megatron's multi-head latent attention does not read, and slime's flags for such models give in several ways
UNREAD = ("kv_channels", "add_qkv_bias")
MOST = 10_000  #: repetitions in --moe-layer-freq and --linear-attention-freq
#: how many positions a sequence may have: a flag may say fewer than config.json
BOUNDS = ("max_position_embeddings", "seq_length")


def check_model_args(given: Mapping[str, Any], fields: Mapping[str, Any], gpt: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of `given` when all that describes the model has been compared with config.json.

    Args:
        given: Megatron's settings by field.
        fields: `Family.transformer` of config.json.
        gpt: `Family.gpt` and `Family.facts` of it, with vocab_size and max_position_embeddings.

    Raises:
        UsageError: for a setting that says otherwise.
    """
    facts = {**WITHOUT, **fields, **gpt}
    if facts["num_moe_experts"]:
        facts["moe_layer_freq"] = tuple(facts["moe_layer_freq"])
    if facts.get("linear_attention_freq"):
        facts["linear_attention_freq"] = tuple(facts["linear_attention_freq"])
    rest = {}
    for field, value in given.items():
        if field in BOUNDS:
            _check_bound(field, value, facts.get("max_position_embeddings"))
        elif field in UNREAD and facts["multi_latent_attention"]:
            continue
        elif field == "group_query_attention":
            _check_grouped(value, facts)
        elif field in facts:
            _check(field, value, facts)
        else:
            rest[field] = value
    return rest


def _check(field: str, value: Any, facts: Mapping[str, Any]) -> None:
    fact = facts[field]
    listed = field in PERIODS
    said = _layers(value, facts["num_layers"], field) if listed else value
    if isinstance(said, str) and isinstance(fact, (int, float)) and not isinstance(fact, bool):
        said = _number(said)
    if said == fact or (_nothing(field, said) and _nothing(field, fact)):
        return
    says = "no such thing" if fact is None else _runs(fact) if listed else fact
    where = f" for {field}" if isinstance(fact, bool) else ""
    raise UsageError(f"{as_flag(field, value)}: the model's config.json says {says}{where}", "leave the flag out")


def _nothing(field: str, value: Any) -> bool:
    """Whether a value means the same as leaving the setting out: a single group, a factor of 1."""
    ones = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor")
    return value is None or (field in ones and value == 1)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# ---- --moe-layer-freq, --linear-attention-freq

PERIODS = ("moe_layer_freq", "linear_attention_freq")


def _layers(value: Any, layers: int, field: str) -> Any:
    """One 0 or 1 for each layer: from a period, a list, or a text such as "([0]*3+[1]*5)*4".

    Any other value is returned as it is.
    """
    if isinstance(value, str):
        try:
            value = _expression(ast.parse(value.strip(), mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    if isinstance(value, int) and value > 0:  # Megatron: layers 0, value, 2 value, ... have experts
        if field == "linear_attention_freq":  # of every `value` layers the last has softmax attention
            return tuple(int((layer + 1) % value != 0) for layer in range(layers))
        return tuple(int(layer % value == 0) for layer in range(layers))
    return tuple(value) if isinstance(value, list) else value


def _expression(node: ast.expr) -> int | list[int]:
    """A whole number, a list of them, lists joined by + or repeated by *.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_expression(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return items
    if isinstance(node, ast.BinOp):
        left = _expression(node.left)
        right = _expression(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right <= MOST:
            return left * right
    raise ValueError(ast.dump(node))


def _runs(layers: Sequence[int]) -> str:
    """Layers as Megatron's flag spells them: [0]*3+[1]*89."""
    return "+".join(f"[{value}]*{len(list(same))}" for value, same in itertools.groupby(layers))


# ---- bounds and switches


def _check_bound(field: str, value: Any, most: int | None) -> None:
    number = _number(value) if isinstance(value, str) else value
    if most is not None and (isinstance(number, str) or number > most):
        raise UsageError(
            f"{as_flag(field, value)}: the model's config.json says {most} positions at most", "leave the flag out"
        )


def _check_grouped(value: Any, facts: Mapping[str, Any]) -> None:
    """The switch says only that there may be fewer key-value heads than heads."""
    heads = facts["num_attention_heads"]
    groups = facts["num_query_groups"]
    if not value and heads != groups:
        raise UsageError(
            f"--no-group-query-attention: the model's config.json says {groups} key-value heads for {heads} heads"
        )
