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


def undivided(o: Options, fields: Mapping[str, Any], positions: int | None) -> Iterator[UsageError]:
    """What cannot be cut.

    Args:
        fields: `Family.transformer` of config.json.
        positions: max_position_embeddings.
    """
    yield from _heads(fields, "--tensor-model-parallel-size", o.tensor_model_parallel_size)
    if o.num_engines:
        each = o.rollout_num_gpus_per_engine
        parts = o.engine_data_parallel_size
        flag = (
            f"--rollout-num-gpus-per-engine {each} / --vllm-data-parallel-size"
            if parts > 1
            else "--rollout-num-gpus-per-engine"
        )
        yield from _heads(fields, flag, parts if each % parts else each // parts, shown=parts if parts > 1 else each)
    yield from _exchanged_heads(o, fields)
    yield from _linear_heads(o, fields)
    yield from _stages(o, fields["num_layers"])
    yield from _experts(o, fields)
    if positions and (o.rollout_max_context_len or 0) > positions:
        yield UsageError(
            f"--rollout-max-context-len {o.rollout_max_context_len}: the model's config.json says {positions} "
            "positions",
            "lower it",
        )


def _heads(fields: Mapping[str, Any], flag: str, size: int, shown: int | None = None) -> Iterator[UsageError]:
    heads = fields["num_attention_heads"]
    groups = fields["num_query_groups"]
    given = f"{flag} {shown or size}"
    if heads % size:
        yield UsageError(
            f"{given}: the {heads} attention heads of config.json cannot be divided by {size}", "change it"
        )
    elif groups % size and size % groups:
        yield UsageError(
            f"{given}: the {groups} key-value heads of config.json are neither a multiple of {size} nor a divisor",
            "change it",
        )


def _linear_heads(o: Options, fields: Mapping[str, Any]) -> Iterator[UsageError]:
    """Of a gated delta net tensor-parallel ranks, of trainer and engines, have whole key heads."""
    if not fields.get("linear_attention_freq"):
        return
    heads = fields["linear_num_key_heads"]
    sizes = {f"--tensor-model-parallel-size {o.tensor_model_parallel_size}": o.tensor_model_parallel_size}
    if o.num_engines and o.rollout_num_gpus_per_engine % (parts := o.engine_data_parallel_size) == 0:
        given = f"--rollout-num-gpus-per-engine {o.rollout_num_gpus_per_engine}"
        given += f" / --vllm-data-parallel-size {parts}" * (parts > 1)
        sizes[given] = o.rollout_num_gpus_per_engine // parts
    for given, size in sizes.items():
        if heads % size:
            yield UsageError(
                f"{given}: the {heads} key heads of linear attention of config.json cannot be divided by {size}",
                "change it",
            )


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
    stages = o.pipeline_model_parallel_size
    megatron = o.megatron
    if stages == 1 or any(megatron.get(name) for name in _OTHER_CUTS):
        return
    ends = {name: megatron[name] for name in (_FIRST, _LAST) if megatron.get(name)}
    rest = layers - sum(ends.values())
    middle = stages - len(ends)
    said = " and ".join(
        [f"--pipeline-model-parallel-size {stages}", *(as_flag(name, value) for name, value in ends.items())]
    )
    if rest < 0 or (middle and (rest < middle or rest % middle)) or (not middle and rest):
        yield UsageError(
            f"{said}: the {layers} layers of config.json cannot be divided so",
            "change one, or give --decoder-first-pipeline-num-layers",
        )
    elif not ends:
        yield from _virtual_stages(o, layers, stages)


#: settings with which layers are cut in another way
_OTHER_CUTS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _virtual_stages(o: Options, layers: int, stages: int) -> Iterator[UsageError]:
    own = layers // stages
    for flag, value in (
        ("--num-virtual-stages-per-pipeline-rank", o.num_virtual_stages_per_pipeline_rank),
        ("--num-layers-per-virtual-pipeline-stage", o.num_layers_per_virtual_pipeline_stage),
    ):
        if value and own % value:
            yield UsageError(
                f"{flag} {value}: the {own} layers of a rank (--pipeline-model-parallel-size {stages}) cannot be "
                "divided by it",
                "change one of them",
            )


def _experts(o: Options, fields: Mapping[str, Any]) -> Iterator[UsageError]:
    experts = fields.get("num_moe_experts")
    ranks = o.expert_model_parallel_size
    if experts:
        if experts % ranks:
            yield UsageError(
                f"--expert-model-parallel-size {ranks}: the {experts} experts of config.json cannot be divided by it"
            )
        return
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
