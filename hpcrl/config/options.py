"""Every option, declared once: its flag, TOML key, type, default, help line and row of docs/options.md come from here.

Invariant: an option that exists here has an effect.  Names and meanings are slime's or Megatron's where one exists
(`source` says which).  Settings of Megatron's and vLLM's own dataclasses are not repeated here: they arrive in
`megatron` and `vllm`, checked against the installed packages by `setting_names.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from hpcrl.config.algorithm_options import AlgorithmOptions, OffPolicyOptions
from hpcrl.config.option_fields import Base, opt


class RunOptions(Base):
    """run: the directory, the seed, the length"""

    run_dir: str = opt("runs/{name}-{time}", "run directory; {name} is the recipe's, {time} the start in UTC")
    seed: int = opt(1234, "seed of Megatron's random numbers", "megatron")
    num_rollout: int | None = opt(None, "rollouts (training iterations); 0 with --eval-interval only evaluates", "slime", ge=0)
    num_epoch: int | None = opt(None, "passes over the prompts; read when --num-rollout is not given", "slime", ge=1)
    deterministic_mode: bool = opt(
        False,
        "same seed, same bits: losses and samples repeat exactly, also across a resume; on GPUs as far as vLLM's and Transformer "
        "Engine's own such modes hold",
        "megatron",
    )
    engine_start_timeout: float = opt(900.0, "seconds an engine may take until it answers", gt=0)
    rollout_timeout: float = opt(3600.0, "seconds the samples of one step may take", gt=0)
    update_timeout: float = opt(600.0, "seconds one weight update may take", gt=0)
    request_timeout: float = opt(1800.0, "seconds one generation request may take", gt=0)
    stop_timeout: float = opt(120.0, "seconds that a stopped run may take to finish its step and save", gt=0)
    distributed_timeout_minutes: float = opt(10, "minutes until a collective of the trainer gives up", "megatron", gt=0)


class ClusterOptions(Base):
    """cluster: how many of what"""

    actor_num_nodes: int = opt(1, "nodes of the trainer", "slime", ge=1)
    actor_num_gpus_per_node: int = opt(8, "trainer ranks on each of its nodes (GPUs, or processes on CPU)", "slime", ge=1)
    rollout_num_gpus: int | None = opt(
        None,
        "GPUs of all engines together; 0 starts none (sft_loss needs none); default with --colocate: the trainer's",
        "slime",
        ge=0,
    )
    rollout_num_gpus_per_engine: int = opt(1, "GPUs of one engine: its tensor-parallel size", "slime", ge=1)
    colocate: bool = opt(
        False, "engines share the trainer's GPUs; both stay in memory, so lower --vllm-gpu-memory-utilization", "slime"
    )
    rank_launcher: Literal["torchrun", "ranks"] = opt(
        "torchrun", "torchrun: one task a host, which starts torchrun; ranks: srun or mpirun starts one task for each slot"
    )
    interface: str | None = opt(None, "network interface that hosts talk through, such as ib0; default: the only one they share")
    launch_timeout: float = opt(60.0, "seconds until every host must have answered", gt=0)
    trainer_threads: int = opt(
        1,
        "CPU threads of one trainer rank (OMP_NUM_THREADS); --optimizer-cpu-offload takes its share of the cores if that is more",
        ge=1,
    )
    train_env_vars: dict[str, str] = opt({}, "JSON object of environment variables for the trainer ranks", "slime")


class ModelOptions(Base):
    """model and checkpoints"""

    hf_checkpoint: str | None = opt(None, "Hugging Face directory: config, tokenizer, and the weights to start from", "slime")
    spec: list[str] = opt([], "words of slime's --spec; the model is built from config.json, these must name the same", "slime")
    load: str | None = opt(
        None, "checkpoint directory to start from (its weights; also optimizer and position on resume)", "slime"
    )
    ref_load: str | None = opt(
        None,
        "checkpoint or Hugging Face directory of the reference; also to start from where --load is not given or still empty",
        "slime",
    )
    ckpt_step: int | None = opt(None, "step of --load to start from; default: the newest", "slime", ge=0)
    save: str | None = opt(None, "checkpoint directory; default: checkpoints/ in the run directory", "slime")
    save_interval: int | None = opt(None, "save every N rollouts, and always after the last", "slime", ge=1)
    async_save: bool = opt(False, "write checkpoints in the background; the last one is waited for", "slime")
    save_retain_interval: int | None = opt(
        None, "keep checkpoints of every N rollouts and the newest, remove the others", "megatron", ge=1
    )
    save_keep_last: int | None = opt(None, "keep the N newest checkpoints; with --save-retain-interval those too", ge=1)
    bf16: bool = opt(
        True, "train in bfloat16 with fp32 master weights; --no-bf16 trains in fp32 (Megatron's default)", "megatron"
    )


class DataOptions(Base):
    """data"""

    prompt_data: str | None = opt(None, "prompt file, .jsonl", "slime")
    input_key: str = opt("input", "key of the prompt: a string or a list of chat messages", "slime")
    label_key: str | None = opt(None, "key of the label that the reward compares with", "slime")
    rejected_key: str | None = opt(
        None, "key of the worse response (dpo_loss); --label-key is the better one's, and nothing is sampled"
    )
    metadata_key: str = opt("metadata", "key of an object that is kept with the sample", "slime")
    apply_chat_template: bool = opt(False, "render the prompt with the tokenizer's chat template", "slime")
    rollout_shuffle: bool = opt(False, "shuffle the prompts in each epoch", "slime")
    rollout_seed: int = opt(42, "seed of the shuffle and of every sample", "slime")


class RolloutOptions(Base):
    """rollout: sampling"""

    rollout_batch_size: int = opt(32, "prompts (groups) of one rollout", "slime", ge=1)
    n_samples_per_prompt: int = opt(1, "responses to each prompt; grpo compares them, and needs 2 at least", "slime", ge=1)
    rollout_max_response_len: int = opt(1024, "tokens of a response at most", "slime", ge=1)
    rollout_max_prompt_len: int | None = opt(None, "longer prompts are an error that names file and line", "slime", ge=1)
    rollout_max_context_len: int | None = opt(
        None, "prompt and response together at most; sets the engine's context", "slime", ge=2
    )
    rollout_temperature: float = opt(1.0, "sampling temperature; the trainer divides its logits by the same", "slime", gt=0)
    rollout_stop: list[str] = opt([], "strings that end a response", "slime")
    rollout_stop_token_ids: list[int] = opt([], "token ids that end a response", "slime")
    rollout_server_concurrency: int = opt(512, "requests in flight per engine at most (slime: --sglang-server-concurrency)", ge=1)


class RewardOptions(Base):
    """rewards (docs/rewards.md)"""

    rm_type: str | list[str] | None = opt(
        None,
        "reward: a file of hpcrl/rollout/rewards/ such as math, boxed_NAME for the boxed part of the response, or module.function; "
        "several with weights are added up: math:1.0 my.brief:0.1; a prompt's metadata may name another",
        "slime",
    )
    custom_rm_path: str | None = opt(
        None, "module.function of an own reward: (options, sample, **kwargs) -> number or object, plain or async", "slime"
    )
    group_rm: bool = opt(False, "--custom-rm-path takes the list of a group's samples and returns a list", "slime")
    rm_url: str | None = opt(None, "where --rm-type remote_rm posts prompt, response and label", "slime")
    reward_key: str | None = opt(None, "key of the reward where a reward is an object", "slime")
    eval_reward_key: str | None = opt(None, "the same in evaluations; default --reward-key", "slime")
    reward_num_workers: int | None = opt(None, "processes that grade; default: the CPUs less one, 8 at most", ge=1)
    reward_cpu_limit: float = opt(5.0, "CPU seconds that one grading may use; reading and comparing takes a thousandth", gt=0)
    reward_timeout: float = opt(120.0, "seconds that one grading may take by the clock, whatever it waits for", gt=0)
    reward_memory_gb: float = opt(2.0, "GiB that one grading may take beyond what its process holds at its start", gt=0)
    reward_max_failed: float = opt(
        0.1, "stop the run when more than this share of a rollout's gradings fails; below it they count 0", ge=0, le=1
    )


class EvalOptions(Base):
    """evaluation"""

    eval_interval: int | None = opt(None, "evaluate every N rollouts, before the first and after the last", "slime", ge=1)
    eval_prompt_data: list[str] = opt([], "NAME PATH [NAME PATH ...]: the held-out prompt files", "slime")
    eval_input_key: str | None = opt(None, "key of the prompt there; default --input-key", "slime")
    eval_label_key: str | None = opt(None, "key of the label there; default --label-key", "slime")
    n_samples_per_eval_prompt: int = opt(1, "responses to each held-out prompt", "slime", ge=1)
    eval_temperature: float | None = opt(None, "temperature there; default --rollout-temperature", "slime", ge=0)
    eval_max_response_len: int | None = opt(None, "tokens of a response there; default --rollout-max-response-len", "slime", ge=1)
    skip_eval_before_train: bool = opt(False, "no evaluation before the first step", "slime")


class BatchOptions(Base):
    """batching and parallel layout"""

    global_batch_size: int | None = opt(None, "samples of one optimizer step; default: all of a rollout", "slime", ge=1)
    num_steps_per_rollout: int | None = opt(None, "optimizer steps of one rollout; sets --global-batch-size", "slime", ge=1)
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
        True, "as many tokens to every data-parallel rank (slime: off by default); off: samples go to the ranks in turn", "slime"
    )
    tensor_model_parallel_size: int = opt(1, "TP", "megatron", ge=1)
    pipeline_model_parallel_size: int = opt(1, "PP", "megatron", ge=1)
    context_parallel_size: int = opt(1, "CP", "megatron", ge=1)
    num_layers_per_virtual_pipeline_stage: int | None = opt(
        None, "layers of one virtual stage: each pipeline rank holds several, which shortens its idle time", "megatron", ge=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = opt(
        None, "the same as a number of stages; the one to use with uneven first or last stages", "megatron", ge=1
    )
    expert_model_parallel_size: int = opt(1, "EP: ranks that share out the experts of a layer", "megatron", ge=1)
    expert_tensor_parallel_size: int | None = opt(None, "ETP: ranks that share each expert; default: TP", "megatron", ge=1)
    sequence_parallel: bool = opt(False, "split norms and dropout along the sequence over TP", "megatron")


class OptimizerOptions(Base):
    """optimizer (more of Megatron's OptimizerConfig by its own flag names)"""

    lr: float = opt(1e-6, "learning rate (Megatron has no default; slime's is the same)", "megatron", ge=0)
    min_lr: float = opt(0.0, "learning rate at the end of the decay", "megatron", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = opt(
        "constant",
        "schedule after warm-up; WSD: constant, then the decay of --lr-wsd-decay-style (Megatron's default: linear)",
        "megatron",
    )
    lr_warmup_iters: int = opt(0, "optimizer steps of linear warm-up", "megatron", ge=0)
    lr_warmup_fraction: float | None = opt(None, "the same as a part of the schedule's steps", "megatron", ge=0, lt=1)
    lr_warmup_init: float = opt(0.0, "learning rate at the start of the warm-up", "megatron", ge=0)
    lr_decay_iters: int | None = opt(None, "optimizer steps of the schedule; default: all of the run", "megatron", ge=1)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = opt(
        "exponential", "how WSD decays at its end", "megatron"
    )
    lr_wsd_decay_iters: int | None = opt(None, "optimizer steps of that decay", "megatron", ge=1)
    weight_decay: float = opt(0.0, "weight decay (Megatron's default: 0.01)", "megatron", ge=0)
    start_weight_decay: float | None = opt(None, "weight decay at the start, where it grows", "megatron", ge=0)
    end_weight_decay: float | None = opt(None, "weight decay at the end of the schedule", "megatron", ge=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = opt(
        "constant", "how it grows from --start-weight-decay to --end-weight-decay", "megatron"
    )
    adam_beta1: float = opt(0.9, "Adam's first decay rate", "megatron", ge=0, lt=1)
    adam_beta2: float = opt(0.95, "Adam's second decay rate (Megatron's default: 0.999)", "megatron", ge=0, lt=1)
    adam_eps: float = opt(1e-8, "Adam's epsilon", "megatron", gt=0)
    clip_grad: float = opt(1.0, "clip the gradient to this norm; 0 does not", "megatron", ge=0)


class WeightOptions(Base):
    """weight updates"""

    update_weight_buffer_size: int = opt(512 * 1024**2, "bytes of one bucket", "slime", ge=1024)
    weight_transfer: str = opt("auto", "shm, gloo or nccl; auto: nccl with CUDA, else shm on one host, gloo over several")
    check_weight_update_equal: bool = opt(
        False, "after every update compare each tensor of the engine, bit for bit, with what was sent", "slime"
    )
    max_logprob_diff: float | None = opt(
        None, "stop when trainer and engine log-probs differ by more (mean absolute); default 1e-3 in fp32, 0.1 in bf16", gt=0
    )


class Options(
    RunOptions,
    ClusterOptions,
    ModelOptions,
    DataOptions,
    RolloutOptions,
    RewardOptions,
    EvalOptions,
    AlgorithmOptions,
    OffPolicyOptions,
    BatchOptions,
    OptimizerOptions,
    WeightOptions,
):
    """All options of one run, checked and frozen."""

    name: str = opt("run", "name of the run")
    megatron: dict[str, Any] = opt(
        {}, "fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig"
    )
    vllm: dict[str, Any] = opt({}, "fields of vLLM's engine arguments (flags: --vllm-X)")

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """DP = world size / (TP x PP x CP)."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def micro_batch_multiple(self) -> int:
        """What divides the micro-batches of a rank in one optimizer step: Megatron's groups where there are virtual stages."""
        stages = self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank
        if not stages and not self.megatron.get("pipeline_model_parallel_layout"):
            return 1
        return self.megatron.get("microbatch_group_size_per_vp_stage") or self.pipeline_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """ETP: --expert-tensor-parallel-size; Megatron's default is TP."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def learns_labels(self) -> bool:
        """Whether the responses come from the prompt file: supervised fine-tuning, and preferences that are written there."""
        return self.loss_type == "sft_loss" or (self.loss_type == "dpo_loss" and self.rejected_key is not None)

    @property
    def needs_engines(self) -> bool:
        """Whether anything is sampled: learning what the prompt file holds, without evaluation, asks no engine."""
        return not self.learns_labels or self.eval_interval is not None

    @property
    def num_engines(self) -> int:
        """Engines: --rollout-num-gpus over the GPUs of one; none where nothing is sampled."""
        return self.engine_gpus // self.rollout_num_gpus_per_engine if self.needs_engines else 0

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines: --rollout-num-gpus, or with --colocate the trainer's."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.world_size if self.colocate else 0

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout: prompts x responses."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of one rollout."""
        return self.num_steps_per_rollout or self.samples_per_rollout // (self.global_batch_size or self.samples_per_rollout)

    @property
    def step_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.samples_per_rollout // self.steps_per_rollout


#: the groups of options, in the order of the help text
SECTIONS: tuple[type[Base], ...] = Options.__bases__
