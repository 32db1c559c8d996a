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
        "run directory; {name} is the recipe's, {time} the start in UTC, with -2, -3, ... appended if it exists",
    )
    seed: int = opt(1234, "seed of Megatron's random numbers", "megatron")
    num_rollout: int | None = opt(
        None, "rollouts (training iterations); 0 with --eval-interval only evaluates", "slime", ge=0
    )
    live_code: bool = opt(
        False,
        "import custom functions from where they are in every attempt, and not from the copies of their directories "
        "that are made in RUN/code when the run is begun",
    )
    code_path: list[str] = opt(
        [],
        "directories in which modules of custom functions are looked for before the others, and which are copied to "
        "RUN/code; FILE.py:FUNCTION where a dotted path is taken adds that of the file",
    )
    loop: Literal["sync", "async", "fully-async"] = opt(
        "sync",
        "sync: sample, train, sample; async: the next rollout is sampled while one is trained on; fully-async: the "
        "engines never wait, new weights enter while they sample",
    )
    num_epoch: int | None = opt(None, "passes over the prompts; read when --num-rollout is not given", "slime", ge=1)
    deterministic_mode: bool = opt(
        False,
        "same seed, same bits: losses and samples repeat exactly, also across a resume; on GPUs as far as vLLM's and "
        "Transformer Engine's own such modes hold",
        "megatron",
    )
    attempts: int = opt(
        4,
        "how often in a row a stage may start on the hosts of its job without a new checkpoint; healthy engines "
        "continue. In each attempt an engine that dies or hangs is started again up to N - 1 times. 1: the first "
        "failure ends the job",
        ge=1,
    )
    spares: int = opt(
        0,
        "hosts that the job has beyond those that the run needs: they wait, and each takes the place of one that is "
        "lost, or whose hardware breaks, within the job",
        ge=0,
    )
    timeout_factor: float = opt(
        1.0,
        "multiplies time limits: 3600 s for the samples of a step, 300 s for a call of a custom generate function (not "
        "counting engines), and the defaults of --engine-start-timeout, --update-timeout and --request-timeout",
        gt=0,
    )
    engine_start_timeout: float = opt(
        900.0,
        "seconds an engine may take until it answers; 3600 with --vllm-enable-expert-parallel, as a first start then "
        "compiles kernels",
        gt=0,
    )
    update_timeout: float = opt(600.0, "seconds one weight update may take", gt=0)
    request_timeout: float = opt(1800.0, "seconds one generation request may take", gt=0)
    rollout_health_check_timeout: float = opt(
        60.0,
        "seconds that an engine may go without a sign of life before it counts as dead; in a weight update or turn: "
        "--update-timeout (slime: 30)",
        "slime",
        gt=0,
    )
    hang_timeout: float = opt(
        60.0,
        "seconds without a sign of life until a process of the run counts as hung, and is named (at least 15)",
        gt=0,
    )
    stop_timeout: float = opt(120.0, "seconds that a stopped run may take to finish its step and save", gt=0)
    distributed_timeout_minutes: float = opt(10, "minutes until a collective of the trainer gives up", "megatron", gt=0)


# ---- looking


class InspectOptions(Base):
    """looking and replaying (docs/runs.md)"""

    save_debug_rollout_data: str | None = opt(
        None,
        "file for the samples of each rollout, to train from again; {rollout_id} is replaced by its number",
        "slime",
    )
    load_debug_rollout_data: str | None = opt(
        None, "train from such files instead of sampling; implies --debug-train-only", "slime"
    )
    debug_rollout_only: bool = opt(False, "sample and grade with the weights of --hf-checkpoint; no trainer", "slime")
    debug_train_only: bool = opt(
        False, "train alone, without engines: from --load-debug-rollout-data, or on labels", "slime"
    )


# ---- weights


class WeightOptions(Base):
    """weight updates"""

    update_weight_buffer_size: int = opt(
        512 * 1024**2, "bytes of pieces that a rank, or a host of engines, holds at once; of a file", "slime", ge=1024
    )
    update_weights_interval: int = opt(
        1, "async and fully-async: the engines get the weights after every so many rollouts", "slime", ge=1
    )
    weight_transfer: Literal["auto", "shm", "gloo", "nccl", "ipc", "vllm", "disk"] = opt(
        "auto",
        "what carries the weights; vllm: vLLM's own transfer of whole tensors, disk: files, the others: pieces; auto "
        "with CUDA: vllm for a trainer on one node, on several nccl, or ipc with --colocate; without CUDA: shm on one "
        "host, gloo on several",
    )
    update_weight_disk_dir: str | None = opt(
        None, "--weight-transfer disk: a directory that trainer and engines both see; default: of the run", "slime"
    )
    check_weight_update_equal: bool = opt(
        False, "after every update compare each tensor of the engine, bit for bit, with what was sent", "slime"
    )
    max_logprob_diff: float | None = opt(
        None,
        "stop when trainer and engine log-probs differ by more (mean absolute); default 1e-3 in fp32, 0.1 in bf16, "
        "and no bound with --load-debug-rollout-data or dropout",
        gt=0,
    )
