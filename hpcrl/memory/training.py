"""Bytes that a trainer rank takes, term by term: a pure function of config.json, the layout and the settings.

Formulas and their sources: docs/memory.md.  For a checkpoint, what is counted is what Megatron allocates for the
optimizer's state as `trainer/checkpoint/save_load.py` asks for it: gathered over gloo, on the host.

Invariant: of all pipeline stages, the one that takes most is reported; a term is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.memory.parameters import Count, Layout, on_stage, stage_layers
from hpcrl.models.family import Config, Family

GIB = 1024**3
#: bytes of a CUDA context, NCCL's buffers and the libraries' workspaces: not computed, an allowance
LIBRARIES = 3 * GIB
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
#: what TransformerConfig's recompute_modules spare, by the part of a layer (default: attention's inside, which flash
#: never keeps)
_SPARED = {"mlp": ("inner",), "moe": ("inner",), "moe_act": ("activated",), "layernorm": ("normed",)}


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes on the GPU of one rank, by what takes them, and on the host for it."""

    gpu: Mapping[str, float]
    host: Mapping[str, float]
    stage: int

    @property
    def total(self) -> float:
        return sum(self.gpu.values())


def fullest_rank(options: Options, family: Family, config: Config) -> MemoryTerms:
    """The terms of a rank on the pipeline stage that takes most."""
    layout = Layout.of(options, family.transformer(config)["num_layers"])
    return max(
        (rank_on(options, family, config, layout, stage) for stage in range(layout.pp)), key=lambda terms: terms.total
    )


def rank_on(options: Options, family: Family, config: Config, layout: Layout, stage: int) -> MemoryTerms:
    """The terms of a rank on one pipeline stage."""
    count = on_stage(family, config, layout, stage, options.megatron)
    fields = family.transformer(config)
    on_gpu, on_host = optimizer_bytes(options, count, layout)
    saved_here, saved_there = checkpoint_bytes(options, count, layout)
    critic = 2 if needs(options).critic else 1  # a model of the same size in addition to the policy
    gpu = {
        "weights": critic * count.all * weight_bytes(options),
        "gradients": critic * count.all * gradient_bytes(options),
        "optimizer": critic * on_gpu,
        "activations": activation_bytes(options, fields, layout, stage),
        "logits": logits_bytes(options, config, layout) if stage == layout.pp - 1 else 0.0,
        "weight update": update_bytes(options, config, fields),
        "checkpoint": saved_here,
        "libraries": float(LIBRARIES),
    }
    sets = needs(options).reference + 2 * options.keep_old_actor
    host = {
        "optimizer": critic * on_host,
        "reference and old actors": float(sets * count.all * weight_bytes(options)),
        "checkpoint": saved_there,
        "async save": count.all * weight_bytes(options) / layout.copies + on_gpu if options.async_save else 0.0,
    }
    return MemoryTerms(gpu, host, stage)


# ---- what the model's size decides


def weight_bytes(options: Options) -> int:
    """Bytes of one weight as it is trained."""
    return 2 if options.bf16 else 4


def gradient_bytes(options: Options) -> int:
    """Bytes of one element of Megatron's gradient buffers: fp32 unless --grad-reduce-in-bf16."""
    return 4 if options.megatron.get("grad_reduce_in_fp32", True) else weight_bytes(options)


def optimizer_bytes(options: Options, count: Count, layout: Layout) -> tuple[float, float]:
    """(on the GPU, on the host): full-precision weights and Adam's two moments of what a rank updates."""
    told = options.megatron
    spread = told.get("use_distributed_optimizer", True)
    own = count.dense / layout.copies + count.expert / layout.expert_copies if spread else float(count.all)
    careful = told.get("use_precision_aware_optimizer", False)
    moments = (
        0 if told.get("optimizer") == "sgd" else sum(_moment(told, name, careful) for name in ("exp_avg", "exp_avg_sq"))
    )
    master = 4 if options.bf16 else 0  # in fp32 the weights themselves
    if options.bf16 and careful:  # bf16 weights and the 16 bits that they lack
        master = 2 if told.get("store_param_remainders", True) else 4
    if not told.get("optimizer_cpu_offload"):
        return own * (master + moments), 0.0
    share = told.get("optimizer_offload_fraction", 1.0)
    here = own * ((1 - share) * (master + moments) + (0 if careful else share * master))
    return here, own * share * (4 + 4 + 8)  # there in fp32: weights, gradients, moments


def _moment(told: Mapping[str, Any], name: str, careful: bool) -> int:
    return _BYTES.get(str(told.get(f"{name}_dtype", "fp32")), 4) if careful else 4


# ---- what the tokens decide


def longest_sample(options: Options) -> int:
    """Tokens of the longest sample that there may be; without --rollout-max-prompt-len the prompt's are not known, and
    not counted."""
    whole = options.rollout_max_context_len
    parts = (options.rollout_max_prompt_len or 0) + options.rollout_max_response_len
    return min(whole, parts) if whole else parts


def tokens_per_gpu(options: Options) -> int:
    """Tokens of the largest micro-batch on one GPU: context parallelism divides a sample, and a longer one runs
    alone."""
    alone = -(-longest_sample(options) // options.context_parallel_size)
    if options.use_dynamic_batch_size and options.max_tokens_per_gpu:
        return max(options.max_tokens_per_gpu, alone)
    return alone * options.micro_batch_size


def activation_bytes(options: Options, fields: Mapping[str, Any], layout: Layout, stage: int) -> float:
    """What the layers of a stage keep for the backward pass, of all micro-batches that are under way there."""
    told = options.megatron
    tokens = tokens_per_gpu(options)
    layers = stage_layers(fields["num_layers"], layout, stage, told)
    sparse = fields["moe_layer_freq"] if fields.get("num_moe_experts") else [0] * fields["num_layers"]
    item = weight_bytes(options)
    spared = _spared(told)
    whole = [tokens * layer_bytes(fields, layout, bool(sparse[layer]), item, spared) for layer in layers]
    entry = tokens * fields["hidden_size"] * item * _split(layout)
    if told.get("recompute_granularity") != "full":
        return sum(whole) * micro_batches(layout, stage)
    each = told.get("recompute_num_layers") or 1
    if (
        told.get("recompute_method") == "block"
    ):  # the first layers of a stage keep their input alone, the others everything
        kept = each * entry + sum(whole[each:])
        return kept * micro_batches(layout, stage) + max(whole, default=0.0)
    inputs = -(-len(layers) // each) * entry
    return inputs * micro_batches(layout, stage) + sum(sorted(whole)[-each:])


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


def layer_bytes(fields: Mapping[str, Any], layout: Layout, experts: bool, item: int, spared: frozenset[str]) -> float:
    """Bytes a token that one layer keeps, with attention that does not keep its scores (flash)."""
    hidden = fields["hidden_size"]
    split = _split(layout)
    heads, groups, head = (fields[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
    norms = 2 * split * hidden  # the input of each norm: also the residual's
    normed = 0 if "normed" in spared else 2 * split * hidden
    attention = ((heads + 2 * groups) * head + heads * head) / layout.tp  # queries, keys, values; what attention gives
    statistics = 4 * heads / layout.tp  # flash's log-sum-exp of each row, in fp32
    inner, activated = _mlp(fields, layout, experts)
    inner = 0.0 if "inner" in spared else inner
    activated = 0.0 if spared & {"inner", "activated"} else activated
    return item * (norms + normed + attention + inner + activated) + statistics


def _mlp(fields: Mapping[str, Any], layout: Layout, experts: bool) -> tuple[float, float]:
    """Elements a token of (what the first matrix gives and what goes through the dispatcher, what the activation
    gives)."""
    hidden = fields["hidden_size"]
    if not experts:
        return 2 * fields["ffn_hidden_size"] / layout.tp, fields["ffn_hidden_size"] / layout.tp
    routed = (
        _split(layout) * fields["moe_router_topk"] * layout.etp
    )  # copies of a token that a rank computes, if all get as many
    width = fields["moe_ffn_hidden_size"] / layout.etp
    shared = (fields.get("moe_shared_expert_intermediate_size") or 0) / layout.tp
    return routed * (2 * hidden + 2 * width) + 2 * shared, routed * width + shared


def logits_bytes(options: Options, config: Config, layout: Layout) -> float:
    """Logits in the weights' type, and two more of them in fp32 while log-probs are computed."""
    rows = tokens_per_gpu(options)
    if options.log_probs_chunk_size > 0:
        rows = min(rows, options.log_probs_chunk_size)
    return rows * -(-config["vocab_size"] // layout.tp) * (weight_bytes(options) + 8.0)


def update_bytes(options: Options, config: Config, fields: Mapping[str, Any]) -> float:
    """A bucket, and the largest tensor whole in addition to its parts."""
    hidden = fields["hidden_size"]
    largest = hidden * max(config["vocab_size"], 2 * fields["ffn_hidden_size"])
    return options.update_weight_buffer_size + 2.0 * largest * weight_bytes(options)


STATE = 12  #: bytes of a parameter: its fp32 copy and Adam's two moments, in fp32 whatever they are kept in
TWICE = 8  #: of the one that is being gathered: as it comes from the ranks, and put together


def checkpoint_bytes(options: Options, count: Count, layout: Layout) -> tuple[float, float]:
    """(on the GPU, on the host a rank, averaged over those of the host that takes most), whichever of save and load
    takes more.

    A save gathers the state of all data-parallel ranks on the first; a load makes room for all of it on each.
    """
    ranks = options.actor_num_gpus_per_node
    stages = max(1, ranks * layout.pp // options.world_size)  # of the pipeline, on one host
    dense = count.dense * min(ranks, layout.tp * stages)  # on the ranks of a host that are the first to hold them
    expert = count.expert * min(ranks, layout.etp * layout.ep * stages)
    own = ranks * (count.dense / layout.copies + count.expert / layout.expert_copies)
    save = STATE * (dense + expert + own) + TWICE * max(dense, expert)
    return 0.0, max(save, STATE * ranks * count.all) / ranks
