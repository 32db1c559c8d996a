"""How the pipeline is cut: virtual stages, and how neighbours exchange activations.

With v virtual stages each pipeline rank holds v chunks of layers, and in one moment may send to and receive from both
neighbours.  Megatron's batched exchange tells messages apart by the peer alone: between two ranks, and over gloo, it
delivers the activation of one chunk as that of another, without an error.

Invariant: virtual stages always exchange by single, overlapped messages over gloo and between two ranks, and over gloo
nothing is freed that may not have been sent; a cut that does not divide is one UsageError before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from hpcrl.config.options import Options
from hpcrl.errors import UsageError

LAYERS = "--num-layers-per-virtual-pipeline-stage"
STAGES = "--num-virtual-stages-per-pipeline-rank"
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
OVERLAP = "--overlap-p2p-comm"


def pipeline_fields(options: Options, fields: Mapping[str, Any], cuda: bool) -> dict[str, Any]:
    """TransformerConfig's fields on pipeline stages.

    fields: of the model and the user's own; read are num_layers, the uneven stages, the layout and overlap_p2p_comm.
    cuda: whether messages go by NCCL, else by gloo.  UsageError if layers do not divide into the stages, or the user's
    way to exchange activations would be wrong.
    """
    size = options.pipeline_model_parallel_size
    stages = _stages(options, fields)
    overlap = fields.get("overlap_p2p_comm")
    if stages is None:
        if overlap:
            raise UsageError(
                f"{OVERLAP} overlaps the messages of virtual pipeline stages", f"give {STAGES}, or leave it out"
            )
        if fields.get("microbatch_group_size_per_vp_stage"):
            raise UsageError(
                f"--microbatch-group-size-per-virtual-pipeline-stage has no effect without {STAGES}", "leave it out"
            )
        overlap = False
    else:
        overlap = True if overlap is None else overlap
        if not overlap and (size == 2 or not cuda):
            where = "between two pipeline ranks" if size == 2 else "over gloo"
            raise UsageError(
                f"--no-overlap-p2p-communication with virtual pipeline stages: {where} Megatron's batched messages reach the "
                "wrong stage",
                "leave it out",
            )
    return {
        "pipeline_model_parallel_size": size,
        "virtual_pipeline_model_parallel_size": stages,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        "variable_seq_lengths": size > 1,  # packed micro-batches differ in length
        # As Megatron-LM: an activation that was sent is not needed any more.  But the messages of virtual stages may
        # still be under way then: a CUDA stream keeps the order, gloo would send what has taken the activation's place.
        "deallocate_pipeline_outputs": size > 1 and (stages is None or cuda),
    }


def _stages(options: Options, fields: Mapping[str, Any]) -> int | None:
    """Virtual stages of one pipeline rank; None for one."""
    size = options.pipeline_model_parallel_size
    layers = fields["num_layers"]
    # the embedding, or the output layer, may take the place of a layer
    layers += sum(bool(fields.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    per_stage = options.num_layers_per_virtual_pipeline_stage
    stages = options.num_virtual_stages_per_pipeline_rank
    uneven = [name for name in (FIRST, LAST) if fields.get(name)]
    if layout := fields.get("pipeline_model_parallel_layout"):
        if per_stage or stages or uneven:
            raise UsageError("--pipeline-model-parallel-layout says which layer lies where", "leave the other cuts out")
        return _of_layout(layout, size)
    if per_stage:
        if uneven:
            raise UsageError(f"{LAYERS} {per_stage} with uneven first or last stages", f"give {STAGES} instead")
        if layers % (size * per_stage):
            raise UsageError(
                f"{LAYERS} {per_stage} x --pipeline-model-parallel-size {size} does not divide the model's {layers} layers"
            )
        stages = layers // (size * per_stage)
    _check_cut(layers, size, stages or 1, fields)
    return stages if stages and stages > 1 else None


def _of_layout(layout: Any, size: int) -> int | None:
    try:
        stages = PipelineParallelLayerLayout(layout, size).virtual_pipeline_model_parallel_size
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--pipeline-model-parallel-layout {layout}: {error}") from error
    return stages if stages > 1 else None


def _check_cut(layers: int, size: int, stages: int, fields: Mapping[str, Any]) -> None:
    """UsageError unless each pipeline rank's layers, and those of uneven first and last ones, divide into the
    stages."""
    flags = {FIRST: "--decoder-first-pipeline-num-layers", LAST: "--decoder-last-pipeline-num-layers"}
    rest, ranks = layers, size
    for name, flag in flags.items():
        if own := fields.get(name):
            if size == 1:
                raise UsageError(f"{flag} {own} needs a pipeline", "give --pipeline-model-parallel-size, 2 or more")
            if own % stages:
                raise UsageError(f"{flag} {own} cannot be divided into {stages} virtual stages")
            rest, ranks = rest - own, ranks - 1
    if ranks == size and layers % size:
        raise UsageError(
            f"--pipeline-model-parallel-size {size} does not divide the model's {layers} layers",
            f"set {flags[FIRST]} or {flags[LAST]}",
        )
    if ranks == size and layers % (size * stages):
        raise UsageError(f"{STAGES} {stages} does not divide the {layers // size} layers of a pipeline rank")
    if rest < 0 or (rest if not ranks else not rest or rest % (ranks * stages)):
        cut = f" of {stages} virtual stages" if stages > 1 else ""
        raise UsageError(
            f"of the model's {layers} layers {rest} are left for {ranks} pipeline ranks{cut}, which does not divide",
            f"change {flags[FIRST]} or {flags[LAST]}",
        )
