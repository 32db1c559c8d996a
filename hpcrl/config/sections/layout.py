"""Options of who runs where: nodes, GPUs, ranks and engines, the parallel layout and its batches, the model and its
checkpoints.
"""

from __future__ import annotations

from hpcrl.config.sections import Base, opt


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
        "rows with logits at a time, which bounds memory; the backward pass then computes them again; -1: all of a "
        "micro-batch",
        "slime",
        ge=-1,
    )
    balance_data: bool = opt(
        True,
        "balance tokens over data-parallel ranks (slime: off by default); off: samples go to the ranks in turn",
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
        None, "the same as a number of stages; use it with uneven first or last stages", "megatron", ge=1
    )
    expert_model_parallel_size: int = opt(1, "EP: ranks that share the experts of a layer", "megatron", ge=1)
    expert_tensor_parallel_size: int | None = opt(
        None, "ETP: ranks that share each expert; default: TP", "megatron", ge=1
    )
    sequence_parallel: bool = opt(False, "split norms and dropout along the sequence over TP", "megatron")


# ---- cluster


class ClusterOptions(Base):
    """cluster: nodes and GPUs"""

    actor_num_nodes: int = opt(1, "nodes of the trainer", "slime", ge=1)
    actor_num_gpus_per_node: int = opt(
        8, "trainer ranks on each of its nodes (GPUs, or processes on CPU)", "slime", ge=1
    )
    rollout_num_gpus: int | None = opt(
        None,
        "GPUs of all engines together; 0: no engines (for sft_loss); default with --colocate: the trainer's",
        "slime",
        ge=0,
    )
    rollout_num_gpus_per_engine: int = opt(1, "GPUs of one engine: its tensor-parallel size", "slime", ge=1)
    rollout_external_engine_addrs: list[str] = opt(
        [],
        "HOST:PORT of engines started by hpcrl engines serve, besides the run's own or instead of them (docs/runs.md)",
        "slime",
    )
    rollout_external_engine_keys: str | None = opt(None, "directory with the keys of these engines")
    colocate: bool = opt(False, "engines share the trainer's GPUs and take turns with it (docs/sizing.md)", "slime")
    offload_train: bool | None = opt(
        None,
        "keep the trainer's state in host memory while engines sample; default: with --colocate",
        "slime",
    )
    offload_rollout: bool | None = opt(
        None,
        "let engines sleep, without weights and KV cache, while the trainer trains; default: with --colocate",
        "slime",
    )
    interface: str | None = opt(None, "network interface between hosts, such as ib0; default: the only one they share")
    train_env_vars: dict[str, str] = opt({}, "JSON object of environment variables for the trainer ranks", "slime")


# ---- model


class ModelOptions(Base):
    """model and checkpoints"""

    hf_checkpoint: str | None = opt(
        None, "Hugging Face directory: config, tokenizer, and the weights to start from", "slime"
    )
    spec: list[str] = opt([], "words of slime's --spec; they must name the model of config.json", "slime")
    load: str | None = opt(
        None, "run or checkpoint directory to start from (its weights; also optimizer and position on resume)", "slime"
    )
    ref_load: str | None = opt(
        None,
        "checkpoint or Hugging Face directory of the reference; the run also starts from it if --load is missing or "
        "empty",
        "slime",
    )
    ckpt_step: int | None = opt(None, "step of --load to start from; default: the newest", "slime", ge=0)
    verify_checkpoint: bool = opt(False, "before a resume, compare the whole checkpoint with its checksums")
    save: str | None = opt(None, "checkpoint directory; default: checkpoints/ in the run directory", "slime")
    save_interval: int | None = opt(None, "save every N rollouts, and always after the last", "slime", ge=1)
    async_save: bool = opt(False, "write checkpoints in the background; the run waits for the last one", "slime")
    non_persistent_save_interval: int = opt(
        0,
        "every N rollouts copy each rank's state into the memory of its host and of another; 0: never",
        "megatron",
        ge=0,
    )
    save_retain_interval: int | None = opt(
        None, "keep the checkpoints of every N rollouts and the newest", "megatron", ge=1
    )
    save_keep_last: int | None = opt(None, "keep the N newest checkpoints; with --save-retain-interval those too", ge=1)
    bf16: bool = opt(
        True, "train in bfloat16 with fp32 master weights; --no-bf16 trains in fp32 (Megatron's default)", "megatron"
    )
