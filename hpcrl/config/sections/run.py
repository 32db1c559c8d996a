"""How long a run is, where it lies, and how long anything in it may take."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class RunOptions(Base):
    """run: the directory, the seed, the length"""

    run_dir: str = opt(
        "runs/{name}-{time}",
        "run directory; {name} is the recipe's, {time} the start in UTC, with -2, -3, ... behind it if it is taken",
    )
    seed: int = opt(1234, "seed of Megatron's random numbers", "megatron")
    num_rollout: int | None = opt(
        None, "rollouts (training iterations); 0 with --eval-interval only evaluates", "slime", ge=0
    )
    loop: Literal["sync", "async", "fully-async"] = opt(
        "sync",
        "sync: sample, train, sample; async: the next rollout is sampled while one is trained on; fully-async: the engines never "
        "wait, new weights enter while they sample",
    )
    num_epoch: int | None = opt(None, "passes over the prompts; read when --num-rollout is not given", "slime", ge=1)
    deterministic_mode: bool = opt(
        False,
        "same seed, same bits: losses and samples repeat exactly, also across a resume; on GPUs as far as vLLM's and Transformer "
        "Engine's own such modes hold",
        "megatron",
    )
    engine_start_timeout: float = opt(900.0, "seconds an engine may take until it answers", gt=0)
    engine_restarts: int = opt(
        2,
        "how often an engine that has died or hangs is started again before the run ends with its error; 0: never",
        ge=0,
    )
    engine_hang_timeout: float = opt(
        60.0,
        "seconds that an engine may go without a sign of life before it counts as dead; in a weight update or turn: --update-timeout",
        gt=0,
    )
    rollout_timeout: float = opt(3600.0, "seconds the samples of one step may take", gt=0)
    update_timeout: float = opt(600.0, "seconds one weight update may take", gt=0)
    request_timeout: float = opt(1800.0, "seconds one generation request may take", gt=0)
    hang_timeout: float = opt(
        60.0,
        "seconds without a sign of life until a process of the run counts as hung, and is named (at least 15)",
        gt=0,
    )
    stop_timeout: float = opt(120.0, "seconds that a stopped run may take to finish its step and save", gt=0)
    distributed_timeout_minutes: float = opt(10, "minutes until a collective of the trainer gives up", "megatron", gt=0)
