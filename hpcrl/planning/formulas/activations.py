"""Bytes that the tokens of a micro-batch take on a trainer rank: what layers keep for the backward pass, what one layer
takes while it is computed, logits.

Formulas and their sources: docs/sizing.md; tests/planning/memory/test_device_bytes.py counts the same on a device that
knows shapes alone.

Invariant: no term is negative, and none depends on anything but config.json, layout and settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config.options import Options
from hpcrl.models.family import Config, Family, LayerKind, layer_kinds
from hpcrl.models.shared.hybrid import CHUNK
from hpcrl.planning.formulas.parameters import Layout, hidden_norms, stage_layers

#: settings of Megatron's with which a layer keeps its input alone for the backward pass
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: what TransformerConfig's recompute_modules spare, by the part of a layer (default: attention's inside, which flash
#: never keeps)
_SPARED = {"mlp": ("inner",), "moe": ("inner",), "moe_act": ("activated",), "layernorm": ("normed",)}


def weight_bytes(options: Options) -> int:
    """Bytes of one weight as it is trained."""
    return 2 if options.bf16 else 4


def longest_sample(options: Options) -> int:
    """Tokens of the longest sample that there may be; without --rollout-max-prompt-len the prompt's are not known, and
    not counted.  In custom generate functions --rollout-max-response-len bounds each turn, and the context all."""
    whole = options.rollout_max_context_len
    if whole and options.custom_generate_function_path:
        return whole
    parts = (options.rollout_max_prompt_len or 0) + options.rollout_max_response_len
    return min(whole, parts) if whole else parts


def tokens_per_gpu(options: Options) -> int:
    """Tokens of the largest micro-batch on one GPU: context parallelism divides a sample, and a longer one runs
    alone."""
    alone = -(-longest_sample(options) // options.context_parallel_size)
    if options.use_dynamic_batch_size and options.max_tokens_per_gpu:
        return max(options.max_tokens_per_gpu, alone)
    return alone * options.micro_batch_size


def activation_bytes(
    options: Options, family: Family, config: Config, layout: Layout, stage: int
) -> tuple[float, float]:
    """(what the layers of a stage keep for the backward pass, of all micro-batches that are under way there; what the
    layers that are computed at one time take in addition)."""
    told = options.megatron
    fields = family.transformer(config)
    tokens = tokens_per_gpu(options)
    layers = stage_layers(fields["num_layers"], layout, stage, told)
    kinds = layer_kinds(fields)
    item = weight_bytes(options)
    spared = _spared(told)
    sizes = {
        kind: tokens * layer_bytes(fields, layout, kind, item, spared, hidden_norms(family, fields, kind))
        for kind in set(kinds)
    }
    whole = [sizes[kinds[layer]] for layer in layers]
    passing = max((tokens * backward_bytes(fields, layout, kinds[layer], item) for layer in layers), default=0.0)
    entry = tokens * fields["hidden_size"] * item * _split(layout)
    gathered = tokens * fields["hidden_size"] * item if layout.sequence_parallel else 0.0  # Megatron's one buffer
    if stage == layout.pp - 1 and layers:  # a layer like the last one, and its joined input; never computed again
        joined = 6 * tokens * fields["hidden_size"] * item * _split(layout)
        gathered += options.trained_heads * (whole[-1] + joined)
    if told.get("recompute_granularity") != "full":
        return gathered + sum(whole) * micro_batches(layout, stage), passing
    each = told.get("recompute_num_layers") or 1
    if (
        told.get("recompute_method") == "block"
    ):  # the first layers of a stage keep their input alone, the others everything
        kept = each * entry + sum(whole[each:])
        return gathered + kept * micro_batches(layout, stage), max(whole, default=0.0) + passing
    inputs = -(-len(layers) // each) * entry
    return gathered + inputs * micro_batches(layout, stage), sum(sorted(whole)[-each:]) + passing


def micro_batches(layout: Layout, stage: int) -> float:
    """How many micro-batches a stage holds at most, as a multiple of the activations of all its layers.

    1F1B: pp - stage.  With v virtual stages: ((v - 1) pp + 2 (pp - stage - 1) + 1) chunks of 1 / v.
    """
    v = layout.virtual_stages
    behind = layout.pp - stage - 1
    return behind + 1 if v == 1 else ((v - 1) * layout.pp + 2 * behind + 1) / v


def _split(layout: Layout) -> float:
    """The share of the tokens that a rank holds between tensor-parallel regions."""
    return 1 / layout.tp if layout.sequence_parallel else 1.0


def _spared(told: Mapping[str, Any]) -> frozenset[str]:
    if told.get("recompute_granularity") != "selective":
        return frozenset()
    return frozenset(part for module in told.get("recompute_modules") or () for part in _SPARED.get(module, ()))


def layer_bytes(
    fields: Mapping[str, Any], layout: Layout, kind: LayerKind, item: int, spared: frozenset[str], norms: int
) -> float:
    """Bytes a token that one layer keeps, with attention that does not keep its scores (flash).

    Args:
        norms: over the hidden size: their inputs are kept, and what the two before attention and MLP give.
    """
    hidden = fields["hidden_size"]
    split = _split(layout)
    heads, groups, head = (fields[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
    normed = 0 if "normed" in spared else 2 * split * hidden
    statistics = 4 * heads / layout.tp + 4 * norms * split  # of each row, in fp32
    if kind.linear:  # what the matrices give and take; all between is computed again
        # what was projected is kept of whole sequences, also where a context-parallel rank has a part of each
        attention = layout.cp * _delta_width(fields, layout) + _delta_values(fields, layout)
        statistics = 4 * norms * split
    elif fields.get("multi_latent_attention"):
        attention = latent_elements(fields, layout)
        statistics += 4 * split * (1 + bool(fields["q_lora_rank"]))
    else:  # rotated queries and keys; what the matrix gave, of which the values are a part; what attention gives
        attention = ((heads + groups) + (heads + 2 * groups) + heads) * head / layout.tp
        if fields.get("attention_output_gate"):  # as it comes from the matrix, copied out, and attention before it
            attention += (2 * heads + heads) * head / layout.tp
    if fields.get("qk_layernorm") and not (kind.linear or fields.get("multi_latent_attention")):
        attention += heads * head / layout.tp if groups > layout.tp else 0.0  # of several groups queries are copied out
        statistics += 4 * (heads + groups) / layout.tp
    inner, activated = _mlp(fields, layout, kind.experts)
    inner = 0.0 if "inner" in spared else inner
    activated = 0.0 if spared & {"inner", "activated"} else activated
    if kind.experts:
        statistics += split * (3 * 4 * fields["num_moe_experts"] / 2 + 12 * fields["moe_router_topk"])
    return item * (norms * split * hidden + normed + attention + inner + activated) + statistics


def latent_elements(fields: Mapping[str, Any], layout: Layout) -> float:
    """Elements a token that multi-head latent attention keeps: queries, keys, values and what attention gives; of the
    vectors that they come from what the norms take and give; four tables of the rotation."""
    rotated = fields["qk_pos_emb_head_dim"]
    query = 2 * (fields["q_lora_rank"] or 0)
    latent = 2 * fields["kv_lora_rank"] + rotated
    each = 2 * (fields["qk_head_dim"] + rotated + fields["v_head_dim"])
    return fields["num_attention_heads"] * each / layout.tp + _split(layout) * (query + latent) + 4 * rotated


def backward_bytes(fields: Mapping[str, Any], layout: Layout, kind: LayerKind, item: int) -> float:
    """Bytes a token that gradients of one layer's activations take at one time: the MLP's, and four of the hidden
    size; or what a gated delta net computes again, of whole sequences on every context-parallel rank, if that is more.
    """
    inner, activated = _mlp(fields, layout, kind.experts)
    found = item * (inner + activated + 4 * _split(layout) * fields["hidden_size"])
    return max(found, layout.cp * _delta_bytes(fields, layout, item)) if kind.linear else found


def _delta_width(fields: Mapping[str, Any], layout: Layout) -> float:
    """Columns that the input projection of a gated delta net has on a rank."""
    keys = 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"] / layout.tp
    return keys + 2 * _delta_values(fields, layout) + 2 * fields["linear_num_value_heads"] / layout.tp


def _delta_values(fields: Mapping[str, Any], layout: Layout) -> float:
    return fields["linear_num_value_heads"] * fields["linear_value_head_dim"] / layout.tp


def _delta_bytes(fields: Mapping[str, Any], layout: Layout, item: int) -> float:
    """What autograd holds of one gated delta net while it is computed again: 13 to 23 % above what was counted of six
    sizes, in fp32 and bf16, with hooks on saved tensors.
    """
    heads = fields["linear_num_value_heads"] / layout.tp
    key, value = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    width = _delta_width(fields, layout)
    states = 2 * key * value / CHUNK  # the state, once for each chunk of rows
    chunks = 7 * CHUNK  # matrices of rows by rows of a chunk
    return item * (3 * width + heads * value) + 4 * heads * (8 * key + 4 * value + chunks + states)


def _mlp(fields: Mapping[str, Any], layout: Layout, experts: bool) -> tuple[float, float]:
    """Elements a token of (what the first matrix gives and what the dispatcher brings, what the activation gives)."""
    hidden = fields["hidden_size"]
    if not experts:
        return 2 * fields["ffn_hidden_size"] / layout.tp, fields["ffn_hidden_size"] / layout.tp
    routed = (
        _split(layout) * fields["moe_router_topk"] * layout.etp
    )  # copies of a token that a rank computes, if all get as many
    width = fields["moe_ffn_hidden_size"] / layout.etp
    shared = (fields.get("moe_shared_expert_intermediate_size") or 0) / layout.tp
    return routed * (hidden + 2 * width) + 2 * shared, routed * width + shared


def logits_bytes(options: Options, config: Config, layout: Layout) -> float:
    """Logits in the weights' type, and two more of them in fp32 while log-probs are computed; what the last norm takes
    and gives of every token."""
    rows = tokens_per_gpu(options)
    if options.log_probs_chunk_size > 0:
        rows = min(rows, options.log_probs_chunk_size)
    ends = 2 * tokens_per_gpu(options) * config["hidden_size"] * weight_bytes(options) * _split(layout)
    return rows * -(-config["vocab_size"] // layout.tp) * (weight_bytes(options) + 8.0) + ends
