"""Whether a model can be cut as a layout says: heads, layers and experts over the ranks of the trainer and the GPUs of
an engine.

Megatron and vLLM would say so themselves, but on the nodes, when the job has begun.

Invariant: a pure function of config.json's fields and the options; what it refuses one of them would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag
from hpcrl.errors import UsageError

_FIRST = "num_layers_in_first_pipeline_stage"
_LAST = "num_layers_in_last_pipeline_stage"
#: settings with which the embedding, or the output layer, takes the place of a layer
_EXTRA = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def undivided(o: Options, fields: Mapping[str, Any], positions: int | None) -> Iterator[UsageError]:
    """What cannot be cut.

    Args:
        fields: `Family.transformer` of config.json.
        positions: max_position_embeddings.
    """
    tp = o.tensor_model_parallel_size
    given = f"--tensor-model-parallel-size {tp}"
    yield from _heads(fields, given, tp)
    if not all(fields.get("moe_layer_freq") or [0]):
        yield from _columns(given, tp, fields["ffn_hidden_size"], "MLP columns")
    if o.num_engines:
        each = o.rollout_num_gpus_per_engine
        parts = o.engine_data_parallel_size
        given = f"--rollout-num-gpus-per-engine {each}" + f" / --vllm-data-parallel-size {parts}" * (parts > 1)
        yield from _heads(fields, given, parts if each % parts else each // parts)
    yield from _exchanged_heads(o, fields)
    yield from _stages(o, fields["num_layers"])
    yield from _experts(o, fields)
    if positions and (o.rollout_max_context_len or 0) > positions:
        yield UsageError(
            f"--rollout-max-context-len {o.rollout_max_context_len}: the model's config.json says {positions} "
            "positions",
            "lower it",
        )


def _columns(given: str, size: int, count: int, what: str) -> Iterator[UsageError]:
    if count % size:
        yield UsageError(f"{given}: the {count} {what} of config.json cannot be divided by {size}", "change it")


def _heads(fields: Mapping[str, Any], given: str, size: int) -> Iterator[UsageError]:
    groups = fields["num_query_groups"]
    yield from _columns(given, size, fields["num_attention_heads"], "attention heads")
    if fields["num_attention_heads"] % size == 0 and groups % size and size % groups:
        yield UsageError(
            f"{given}: the {groups} key-value heads of config.json are neither a multiple of {size} nor a divisor",
            "change it",
        )
    if fields.get("linear_attention_freq"):  # each rank has whole key heads of a gated delta net
        yield from _columns(given, size, fields["linear_num_key_heads"], "key heads of linear attention")


GATES = (0, 19)  #: the first Megatron-core whose ranks each take their own gates of a key-value group they share


def uncut_gates(o: Options, fields: Mapping[str, Any], megatron: str | None) -> Iterator[UsageError]:
    """More tensor-parallel ranks than key-value heads, with an output gate, in a Megatron-core that cuts the queries of
    such a head for each rank and not the gates.

    Args:
        megatron: the version of Megatron-core; None if it is not known.
    """
    tp = o.tensor_model_parallel_size
    groups = fields["num_query_groups"]
    if o.debug_rollout_only or not fields.get("attention_output_gate") or groups >= tp or megatron is None:
        return
    if tuple(int(part) for part in re.findall(r"\d+", megatron)[:2]) < GATES:
        yield UsageError(
            f"--tensor-model-parallel-size {tp}: Megatron-core {megatron} cannot divide the {groups} key-value heads "
            "of config.json, whose attention has an output gate, over more ranks",
            f"at most {groups}, or Megatron-core 0.19, which needs Python 3.12",
        )


def _exchanged_heads(o: Options, fields: Mapping[str, Any]) -> Iterator[UsageError]:
    """With a2a every rank of a context-parallel group has whole sequences of some of a tensor-parallel rank's heads."""
    tp = o.tensor_model_parallel_size
    cp = o.context_parallel_size
    kind = o.megatron.get("cp_comm_type")
    if cp == 1 or "a2a" not in (kind if isinstance(kind, list) else [kind]):
        return
    for what, count in (
        ("attention heads", fields["num_attention_heads"]),
        ("key-value heads", fields["num_query_groups"]),
    ):
        own = max(1, count // tp)
        if own % cp:
            yield UsageError(
                f"--cp-comm-type a2a with --context-parallel-size {cp}: the {own} {what} of a rank "
                f"(--tensor-model-parallel-size {tp}) cannot be divided by {cp}",
                "change one, or give --cp-comm-type p2p",
            )
            return


def _stages(o: Options, layers: int) -> Iterator[UsageError]:
    """Every rank has at least one layer, all between the first and the last as many, in as many virtual stages."""
    size = o.pipeline_model_parallel_size
    megatron = o.megatron
    if megatron.get("pipeline_model_parallel_layout"):
        return  # Megatron reads it
    layers += sum(bool(megatron.get(name)) for name in _EXTRA)
    ends = {name: megatron[name] for name in (_FIRST, _LAST) if megatron.get(name)}
    rest = layers - sum(ends.values())
    middle = size - len(ends)
    if middle < 0 or rest < middle or (rest % middle if middle else rest):
        said = [f"--pipeline-model-parallel-size {size}", *(as_flag(name, value) for name, value in ends.items())]
        yield UsageError(
            f"{' and '.join(said)}: the {layers} layers of config.json cannot be divided so",
            "change one, or give --decoder-first-pipeline-num-layers",
        )
        return
    flag = "--num-virtual-stages-per-pipeline-rank"
    value = o.num_virtual_stages_per_pipeline_rank
    if per_stage := o.num_layers_per_virtual_pipeline_stage:
        if ends:
            yield UsageError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} with uneven first or last stages",
                f"give {flag} instead",
            )
            return
        flag, value = "--num-layers-per-virtual-pipeline-stage", per_stage
    for own in sorted({*ends.values(), rest // max(middle, 1)}):
        if value and own % value:
            yield UsageError(
                f"{flag} {value}: the {own} layers of a rank (--pipeline-model-parallel-size {size}) cannot be "
                "divided by it",
                "change one of them",
            )


def _experts(o: Options, fields: Mapping[str, Any]) -> Iterator[UsageError]:
    """What is wrong with the layout of the experts, or has no effect without them.

    With EP 1 Megatron takes the experts' parameters for ordinary ones and reduces their gradients over data-parallel
    ranks only; if each tensor-parallel rank holds whole experts, for its own tokens, their gradients are never added.
    """
    ranks = o.expert_model_parallel_size
    tp = o.tensor_model_parallel_size
    etp = o.expert_tensor_size
    if experts := fields.get("num_moe_experts"):
        if ranks == 1 and etp != tp:
            yield UsageError(
                f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and "
                "--expert-model-parallel-size 1: Megatron would not add up the gradients of the experts",
                "leave --expert-tensor-parallel-size out, or use expert parallelism",
            )
        if tp > 1 and not o.sequence_parallel:
            yield UsageError(
                f"--tensor-model-parallel-size {tp}: Megatron trains a model with experts only with sequence "
                "parallelism",
                "add --sequence-parallel",
            )
        yield from _columns(f"--expert-model-parallel-size {ranks}", ranks, experts, "experts")
        given = "--expert-tensor-parallel-size" + " (by default that of TP)" * (not o.expert_tensor_parallel_size)
        yield from _columns(f"{given} {etp}", etp, fields["moe_ffn_hidden_size"], "columns of an expert")
        shared = fields.get("moe_shared_expert_intermediate_size") or 0
        yield from _columns(f"--tensor-model-parallel-size {tp}", tp, shared, "columns of its shared experts")
        return  # ETP says nothing without experts: slime's recipes give 1 to every model
    why = "the model's config.json has no experts"
    if ranks > 1:
        yield UsageError(f"--expert-model-parallel-size {ranks}: {why}", "leave it out")
    if o.vllm.get("enable_expert_parallel"):
        yield UsageError(f"--vllm-enable-expert-parallel (slime's --sglang-ep-size): {why}", "leave it out")
    for name, value in o.megatron.items():
        if name.startswith("moe_") and name not in fields and value not in (None, False, 0):
            yield UsageError(f"{as_flag(name, value)} has no effect: {why}", "leave it out")
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(o, name):
            yield UsageError(f"--{name.replace('_', '-')} has no effect: {why}", "leave it out")
