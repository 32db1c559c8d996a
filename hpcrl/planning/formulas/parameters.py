"""How many parameters a rank holds, by its pipeline stage: a pure function of config.json and the layout.

Invariant: counted from the family's own rules, tensor by tensor, so a family needs no second place that knows its
shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hpcrl.config.options import Options
from hpcrl.models.family import Config, Family, LayerKind, Rule, layer_kinds, tied
from hpcrl.models.lora.matrices import AdaptedMatrix
from hpcrl.models.lora.settings import LoraSettings, lora_settings
from hpcrl.planning.formulas.adapters import elements, matrices_by_name, of_layer

FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class Layout:
    """The parallel sizes that a rank's share depends on.

    Attributes:
        copies: ranks that hold the same dense weights, over which their optimizer state is spread (DP x CP).
        expert_copies: the same for the weights of experts.
        heads: layers that predict further tokens, on the last stage.
        trains_heads: else these are held alone.
        lora: the adapters that alone are trained.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    copies: int
    expert_copies: int
    sequence_parallel: bool
    virtual_stages: int
    heads: int = 0
    trains_heads: bool = True
    lora: LoraSettings | None = None

    @classmethod
    def from_options(cls, options: Options, layers: int) -> Layout:
        """The layout that the options ask for."""
        tp = options.tensor_model_parallel_size
        pp = options.pipeline_model_parallel_size
        cp = options.context_parallel_size
        ep = options.expert_model_parallel_size
        etp = options.expert_tensor_size
        each = options.num_layers_per_virtual_pipeline_stage
        stages = layers // (pp * each) if each else options.num_virtual_stages_per_pipeline_rank or 1
        return cls(
            tp,
            pp,
            cp,
            ep,
            etp,
            copies=options.world_size // (tp * pp),
            expert_copies=options.world_size // (etp * ep * pp),
            sequence_parallel=options.sequence_parallel and tp > 1,
            virtual_stages=stages,
            heads=options.mtp_num_layers or 0,
            trains_heads=options.enable_mtp_training,
            lora=lora_settings(options),
        )


_ALONE = Layout(1, 1, 1, 1, 1, 1, 1, False, 1)


@dataclass(frozen=True)
class Count:
    """Parameters of one rank: dense ones, spread over TP, and those of experts, spread over EP and ETP.

    Attributes:
        fixed: further ones, which are not trained.
    """

    dense: int
    expert: int
    fixed: int = 0

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    @property
    def all(self) -> int:
        return self.trained + self.fixed


def stage_layers(layers: int, layout: Layout, stage: int, megatron: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers on a pipeline stage; with virtual stages, of all its chunks.

    Args:
        megatron: fields that the user set; read are the lengths of uneven first and last stages.
    """
    first = megatron.get(FIRST)
    last = megatron.get(LAST)
    if first or last:
        middle = layout.pp - bool(first) - bool(last)
        rest = layers - (first or 0) - (last or 0)
        sizes = [rest // middle if middle else 0] * layout.pp
        sizes[0], sizes[-1] = first or sizes[0], last or sizes[-1]
        start = sum(sizes[:stage])
        return list(range(start, start + sizes[stage]))
    chunks = layout.pp * layout.virtual_stages
    cuts = [layers * number // chunks for number in range(chunks + 1)]  # even cuts, unless the user gives a layout
    return [layer for number in range(stage, chunks, layout.pp) for layer in range(cuts[number], cuts[number + 1])]


def on_stage(family: Family, config: Config, layout: Layout, stage: int, megatron: Mapping[str, Any]) -> Count:
    """Parameters of a rank on a pipeline stage."""
    fields = family.transformer(config)
    layers = stage_layers(fields["num_layers"], layout, stage, megatron)
    kinds = layer_kinds(fields)
    used = {kinds[layer] for layer in layers}
    each = {kind: _of_rules(layer_rules(family, fields, kind), config, fields, layout) for kind in used}
    found = [each[kinds[layer]] for layer in layers]
    heads = [_of_rules(head_rules(family, fields), config, fields, layout)] * layout.heads * (stage == layout.pp - 1)
    found += heads if layout.trains_heads else []
    dense = sum(count.dense for count in found) + _ends(config, fields, layout, stage)
    fixed = 0 if layout.trains_heads else sum(count.all for count in heads)
    count = Count(dense, sum(count.expert for count in found), fixed)
    return count if layout.lora is None else _with_adapters(family, config, layout, layers, count)


def _with_adapters(family: Family, config: Config, layout: Layout, layers: Sequence[int], base: Count) -> Count:
    """Adapters of the layers of a rank, over the parameters of `base`."""
    dense = expert = 0
    for rule, matrix, shape in _adapted(family, config, layout, layers):
        if ".experts." in rule.megatron:
            expert += family.transformer(config)["num_moe_experts"] // layout.ep * elements(matrix, shape)
        else:
            dense += elements(matrix, shape)
    return Count(dense, expert, base.all)


def _adapted(
    family: Family, config: Config, layout: Layout, layers: Iterable[int]
) -> Iterator[tuple[Rule, AdaptedMatrix, tuple[int, ...]]]:
    """The matrices of these layers that have an adapter, of experts one, each with the shape of a rank's part."""
    fields = family.transformer(config)
    kinds = layer_kinds(fields)
    assert layout.lora is not None
    known = matrices_by_name(family, config, layout.lora)
    for layer in layers:
        for rule, matrix in of_layer(layer_rules(family, fields, kinds[layer]), layer, known):
            yield rule, matrix, part_shape(rule, fields, config["vocab_size"], layout.tp, layout.etp)


def largest_adapted(family: Family, config: Config, layout: Layout, stage: int, megatron: Mapping[str, Any]) -> int:
    """Elements of the largest matrix of a rank on a pipeline stage that has an adapter; 0 where none has."""
    layers = stage_layers(family.transformer(config)["num_layers"], layout, stage, megatron)
    return max((prod(shape) for _, _, shape in _adapted(family, config, layout, layers)), default=0)


def adapter_parameters(options: Options, family: Family, config: Config) -> int:
    """Parameters of the whole adapter of a run that trains one, each once."""
    return on_stage(family, config, replace(_ALONE, lora=lora_settings(options)), 0, {}).trained


def whole_model(family: Family, config: Config) -> Count:
    """Parameters of the whole model."""
    return on_stage(family, config, _ALONE, 0, {})


def _ends(config: Config, fields: Mapping[str, Any], layout: Layout, stage: int) -> int:
    """Embedding, final norm and output layer, those that are on the stage."""
    width = -(-config["vocab_size"] // layout.tp) * fields["hidden_size"]
    last = stage == layout.pp - 1
    output = last and not (tied(config) and layout.pp == 1)  # on a separate last stage, a tied one is a copy
    return (width if stage == 0 else 0) + (width if output else 0) + (fields["hidden_size"] if last else 0)


def _of_rules(rules: Iterable[Rule], config: Config, fields: Mapping[str, Any], layout: Layout) -> Count:
    dense = expert = 0
    for rule in rules:
        size = prod(part_shape(rule, fields, config["vocab_size"], layout.tp, layout.etp))
        if ".experts." in rule.megatron:
            expert += fields["num_moe_experts"] // layout.ep * size
        else:
            dense += size
    return Count(dense, expert)


def largest_module(family: Family, config: Config) -> int:
    """Parameters of the largest module that is loaded at once: a layer's experts together, an embedding, or one fused
    matrix."""
    fields = family.transformer(config)
    found = [config["vocab_size"] * fields["hidden_size"]]
    for kind in sorted(set(layer_kinds(fields))):
        rules = list(layer_rules(family, fields, kind))
        sizes = {rule.megatron: prod(part_shape(rule, fields, config["vocab_size"], 1, 1)) for rule in rules}
        stacked = sum(size for name, size in sizes.items() if ".experts." in name)
        found += [
            stacked * (fields.get("num_moe_experts") or 0),
            *(n for name, n in sizes.items() if ".experts." not in name),
        ]
    return max(found)


def layer_rules(family: Family, fields: Mapping[str, Any], kind: LayerKind) -> Iterator[Rule]:
    """Rules of a layer of this kind, each tensor once: Transformer Engine's names and the local layers' stand for the
    same one."""
    yield from _each_once(family.rules, fields, kind)


def head_rules(family: Family, fields: Mapping[str, Any]) -> Iterator[Rule]:
    """The same of a layer that predicts a further token, which is like the model's last one."""
    yield from _each_once(family.heads, fields, LayerKind(bool(fields.get("num_moe_experts"))))


def _each_once(rules: Iterable[Rule], fields: Mapping[str, Any], kind: LayerKind) -> Iterator[Rule]:
    seen: set[Sequence[str]] = set()
    for rule in rules:
        mine = "{layer}" in rule.megatron and rule.on(kind) and rule.fits(fields)
        if mine and rule.hf not in seen and not rule.megatron.endswith("expert_bias"):  # which is a buffer
            seen.add(rule.hf)
            yield rule


def hidden_norms(family: Family, fields: Mapping[str, Any], kind: LayerKind) -> int:
    """Norms of a layer over the hidden size."""
    return sum(
        rule.kind == "same" and rule.hf[0].endswith("layernorm.weight") and ".self_attn." not in rule.hf[0]
        for rule in layer_rules(family, fields, kind)
    )


#: matrices that a checkpoint holds in two tensors
HALVED = ("gate_up", "fused_gate_up")


def halved_on_stage(family: Family, config: Config, layout: Layout, stage: int, megatron: Mapping[str, Any]) -> int:
    """Elements of all those of a rank on a pipeline stage."""
    found = _in_layers(family, config, layout, stage, megatron)
    return sum(size for rule, size in found if rule.kind in HALVED)


def sizes_on_stage(
    family: Family, config: Config, layout: Layout, stage: int, megatron: Mapping[str, Any]
) -> Iterator[int]:
    """Elements of every parameter of a rank on a pipeline stage."""
    yield from (size for _, size in _in_layers(family, config, layout, stage, megatron))
    fields = family.transformer(config)
    width = -(-config["vocab_size"] // layout.tp) * fields["hidden_size"]
    yield from itertools.repeat(width, _ends(config, fields, layout, stage) // width)


def _in_layers(
    family: Family, config: Config, layout: Layout, stage: int, megatron: Mapping[str, Any]
) -> Iterator[tuple[Rule, int]]:
    fields = family.transformer(config)
    kinds = layer_kinds(fields)
    rules: list[Rule] = []
    for layer in stage_layers(fields["num_layers"], layout, stage, megatron):
        rules += layer_rules(family, fields, kinds[layer])
    for rule in rules + list(head_rules(family, fields)) * layout.heads * (stage == layout.pp - 1):
        times = fields["num_moe_experts"] // layout.ep if ".experts." in rule.megatron else 1
        size = prod(part_shape(rule, fields, config["vocab_size"], layout.tp, layout.etp))
        yield from itertools.repeat((rule, size), times)


def part_shape(rule: Rule, fields: Mapping[str, Any], vocab: int, tp: int, etp: int) -> tuple[int, ...]:
    """Shape of one rank's part of a parameter.

    Args:
        vocab: tokens, which are padded to a multiple of TP.
    """
    hidden = fields["hidden_size"]
    head = fields["kv_channels"]
    name = rule.megatron
    if fields.get("multi_latent_attention") and (found := _latent_shape(name, fields, tp)):
        return found
    if rule.attention == "linear" or rule.kind == "gated_qkv":
        return _hybrid_shape(rule, fields, tp)
    double = 2 if rule.kind in ("gate_up", "fused_gate_up") else 1
    if rule.kind == "vocab":
        return (-(-vocab // tp), hidden)
    if "eh_proj" in name:
        return (hidden // tp, 2 * hidden)
    if rule.kind == "over_heads":
        return (fields["num_attention_heads" if ".q_layernorm." in name else "num_query_groups"] * head,)
    if rule.kind == "same":
        if ".q_layernorm." in name or ".k_layernorm." in name:
            return (head,)
        if name.endswith("expert_bias"):
            return (fields["num_moe_experts"],)
        if name.endswith("shared_experts.gate_weight"):
            return (1, hidden)
        return (fields["num_moe_experts"], hidden) if ".router." in name else (hidden,)
    if rule.kind == "qkv":
        rows = (fields["num_attention_heads"] + 2 * fields["num_query_groups"]) * head // tp
        return (rows,) if name.endswith("bias") else (rows, hidden)
    if "linear_proj" in name:
        return (hidden, fields["num_attention_heads"] * head // tp)
    if ".experts." in name:
        width = fields["moe_ffn_hidden_size"] // etp
    else:
        width = fields["moe_shared_expert_intermediate_size" if "shared_experts" in name else "ffn_hidden_size"] // tp
    return (hidden, width) if rule.kind == "row" else (double * width, hidden)


def _latent_shape(name: str, fields: Mapping[str, Any], tp: int) -> tuple[int, ...] | None:
    """Of a matrix or norm of multi-head latent attention; None of any other parameter."""
    hidden = fields["hidden_size"]
    query = fields["q_lora_rank"] or hidden
    latent = fields["kv_lora_rank"]
    heads = fields["num_attention_heads"] // tp
    whole = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"]
    shapes = {
        "linear_q_proj.weight": (heads * whole, hidden),
        "linear_q_down_proj.weight": (query, hidden),
        "q_layernorm.weight": (query,),
        "linear_q_up_proj.layer_norm_weight": (query,),
        "linear_q_up_proj.weight": (heads * whole, query),
        "linear_kv_down_proj.weight": (latent + fields["qk_pos_emb_head_dim"], hidden),
        "kv_layernorm.weight": (latent,),
        "linear_kv_up_proj.layer_norm_weight": (latent,),
        "linear_kv_up_proj.weight": (heads * (fields["qk_head_dim"] + fields["v_head_dim"]), latent),
    }
    return shapes.get(name.partition(".self_attention.")[2])


def _hybrid_shape(rule: Rule, fields: Mapping[str, Any], tp: int) -> tuple[int, ...]:
    """As `part_shape`, of a gated delta net and of attention with an output gate."""
    hidden = fields["hidden_size"]
    if rule.kind == "gated_qkv":
        return (2 * (fields["num_attention_heads"] + fields["num_query_groups"]) * fields["kv_channels"] // tp, hidden)
    values = fields["linear_num_value_heads"] // tp
    size = fields["linear_value_head_dim"]
    channels = 2 * fields["linear_num_key_heads"] // tp * fields["linear_key_head_dim"] + values * size
    if rule.kind == "delta_conv":
        return (channels, 1, fields["linear_conv_kernel_dim"])
    if rule.kind in ("delta_in", "delta_in_apart"):
        return (channels + values * (size + 2), hidden)
    if rule.kind == "row":
        return (hidden, values * size)
    if rule.kind == "column":
        return (values,)
    return (size,) if "out_norm" in rule.megatron else (hidden,)
