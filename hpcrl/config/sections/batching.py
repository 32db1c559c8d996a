"""Batches, micro-batches and the parallel layout."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class BatchOptions(Base):
    """batching and parallel layout"""

    global_batch_size: int | None = opt(None, "samples of one optimizer step; default: all of a rollout", "slime", ge=1)
    num_steps_per_rollout: int | None = opt(
        None, "optimizer steps of one rollout; sets --global-batch-size", "slime", ge=1
    )
    micro_batch_size: int = opt(1, "samples of one micro-batch without --use-dynamic-batch-size", "slime", ge=1)
    use_dynamic_batch_size: bool = opt(False, "pack samples up to --max-tokens-per-gpu", "slime")
    max_tokens_per_gpu: int | None = opt(
        None, "tokens of one packed micro-batch per GPU; a longer sample runs alone", "slime", ge=1
    )
    log_probs_chunk_size: int = opt(
        -1,
        "rows that have logits at once, which bounds their memory; the backward pass then computes them again; -1: all of a "
        "micro-batch",
        "slime",
        ge=-1,
    )
    balance_data: bool = opt(
        True,
        "as many tokens to every data-parallel rank (slime: off by default); off: samples go to the ranks in turn",
        "slime",
    )
    tensor_model_parallel_size: int = opt(1, "TP", "megatron", ge=1)
    pipeline_model_parallel_size: int = opt(1, "PP", "megatron", ge=1)
    context_parallel_size: int = opt(1, "CP", "megatron", ge=1)
    num_layers_per_virtual_pipeline_stage: int | None = opt(
        None,
        "layers of one virtual stage: each pipeline rank holds several, which shortens its idle time",
        "megatron",
        ge=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = opt(
        None, "the same as a number of stages; the one to use with uneven first or last stages", "megatron", ge=1
    )
    expert_model_parallel_size: int = opt(1, "EP: ranks that share out the experts of a layer", "megatron", ge=1)
    expert_tensor_parallel_size: int | None = opt(
        None, "ETP: ranks that share each expert; default: TP", "megatron", ge=1
    )
    sequence_parallel: bool = opt(False, "split norms and dropout along the sequence over TP", "megatron")
