"""Options of a run as a whole: its length, directory and time limits, what is kept of samples, runs of one side alone,
and weight updates.
"""

from __future__ import annotations

from typing import Literal

from hpcrl.config.sections import Base, opt


class RunOptions(Base):
    """run: the directory, the seed, the length"""

    run_dir: str = opt(
        "runs/{name}-{time}",
        "run directory; {name} is the recipe's name, {time} the start in UTC; -2, -3, ... is appended if it exists",
    )
    seed: int = opt(1234, "seed of Megatron's random numbers", "megatron")
    num_rollout: int | None = opt(
        None, "rollouts (training iterations); 0 with --eval-interval only evaluates", "slime", ge=0
    )
    live_code: bool = opt(
        False,
        "import custom functions from their own directories in every attempt, not from their copies in RUN/code",
    )
    code_path: list[str] = opt(
        [],
        "directories to search first for modules of custom functions, and to copy to RUN/code; FILE.py:FUNCTION in "
        "place of a dotted path adds the directory of the file",
    )
    loop: Literal["sync", "async", "fully-async"] = opt(
        "sync",
        "sync: sample, train, sample; async: sample the next rollout while training on this one; fully-async: never "
        "pause sampling, new weights arrive in between",
    )
    num_epoch: int | None = opt(None, "passes over the prompts; ignored with --num-rollout", "slime", ge=1)
    deterministic_mode: bool = opt(
        False,
        "same seed, same bits: losses and samples repeat exactly, also across a resume; on GPUs as far as the "
        "deterministic modes of vLLM and Transformer Engine hold",
        "megatron",
    )
    attempts: int = opt(
        4,
        "starts of a stage in a row without a new checkpoint, on the hosts of its job; healthy engines continue. In "
        "each attempt a dead or hung engine is restarted up to N - 1 times. 1: the first failure ends the job",
        ge=1,
    )
    oom_retries: int = opt(
        3,
        "starts of a stage with less after a GPU's out-of-memory error (docs/runs.md); 0: none",
        ge=0,
    )
    spares: int = opt(
        0,
        "extra hosts of the job, each of which waits to replace a lost or broken one",
        ge=0,
    )
    timeout_factor: float = opt(
        1.0,
        "multiplies time limits: 3600 s for the samples of a step, 300 s for a call of a custom generate function "
        "(without engines), and the defaults of --engine-start-timeout, --update-timeout and --request-timeout",
        gt=0,
    )
    engine_start_timeout: float = opt(
        900.0,
        "seconds until a starting engine must answer; 3600 with --vllm-enable-expert-parallel, which compiles kernels",
        gt=0,
    )
    update_timeout: float = opt(600.0, "seconds for one weight update", gt=0)
    request_timeout: float = opt(1800.0, "seconds for one generation request", gt=0)
    rollout_health_check_timeout: float = opt(
        60.0,
        "seconds without a sign of life until an engine counts as dead; in a weight update or turn: --update-timeout "
        "(slime: 30)",
        "slime",
        gt=0,
    )
    hang_timeout: float = opt(
        60.0,
        "seconds without a sign of life until a process counts as hung and is named (at least 15)",
        gt=0,
    )
    stop_timeout: float = opt(120.0, "seconds for a stopped run to finish its step and save", gt=0)
    distributed_timeout_minutes: float = opt(10, "minutes until a collective of the trainer fails", "megatron", gt=0)


# ---- looking


class InspectOptions(Base):
    """debugging and replay (docs/runs.md)"""

    save_debug_rollout_data: str | None = opt(
        None,
        "file for the samples of each rollout, to train on again; {rollout_id} is replaced by its number",
        "slime",
    )
    load_debug_rollout_data: str | None = opt(
        None, "train on such files instead of sampling; implies --debug-train-only", "slime"
    )
    debug_rollout_only: bool = opt(False, "sample and grade with the weights of --hf-checkpoint; no trainer", "slime")
    debug_train_only: bool = opt(False, "train without engines: on --load-debug-rollout-data, or on labels", "slime")


# ---- trackers


class TrackerOptions(Base):
    """trackers: metrics during the run (docs/runs.md)"""

    use_wandb: bool = opt(False, "send metrics to Weights & Biases during the run", "slime")
    wandb_project: str | None = opt(None, "project at the tracker; default: the recipe's name", "slime")
    wandb_group: str | None = opt(None, "group of the run at Weights & Biases", "slime")
    wandb_mode: Literal["online", "offline", "disabled"] | None = opt(
        None, "offline: files in the stage's directory, for `wandb sync`; default: $WANDB_MODE, or online", "slime"
    )
    report_to: list[Literal["wandb", "trackio", "mlflow"]] = opt(
        [], "trackers that get the metrics during the run", "trl"
    )


# ---- weights


class WeightOptions(Base):
    """weight updates"""

    update_weight_buffer_size: int = opt(
        512 * 1024**2,
        "bytes of weights that a rank, or a host of engines, holds at a time; with disk: of one file",
        "slime",
        ge=1024,
    )
    update_weights_interval: int = opt(1, "async and fully-async: rollouts between weight updates", "slime", ge=1)
    weight_transfer: Literal["auto", "shm", "gloo", "nccl", "ipc", "vllm", "disk"] = opt(
        "auto",
        "what carries the weights; vllm: vLLM's own transfer of whole tensors, disk: files, the others: pieces; auto "
        "with CUDA: vllm for a trainer on one node, on several nccl, or ipc with --colocate; without CUDA: shm on one "
        "host, gloo on several",
    )
    update_weight_disk_dir: str | None = opt(
        None,
        "--weight-transfer disk: a directory visible to trainer and engines; default: in the run directory",
        "slime",
    )
    check_weight_update_equal: bool = opt(
        False, "after every update compare each tensor of the engine, bit for bit, with the one sent", "slime"
    )
    max_logprob_diff: float | None = opt(
        None,
        "stop if trainer and engine log-probs differ by more (mean absolute); default 1e-3 in fp32, 0.1 in bf16, none "
        "with --load-debug-rollout-data or dropout",
        gt=0,
    )
