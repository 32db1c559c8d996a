"""How many of what: nodes, GPUs, ranks, engines."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class ClusterOptions(Base):
    """cluster: how many of what"""

    actor_num_nodes: int = opt(1, "nodes of the trainer", "slime", ge=1)
    actor_num_gpus_per_node: int = opt(
        8, "trainer ranks on each of its nodes (GPUs, or processes on CPU)", "slime", ge=1
    )
    rollout_num_gpus: int | None = opt(
        None,
        "GPUs of all engines together; 0 starts none (sft_loss needs none); default with --colocate: the trainer's",
        "slime",
        ge=0,
    )
    rollout_num_gpus_per_engine: int = opt(1, "GPUs of one engine: its tensor-parallel size", "slime", ge=1)
    rollout_external_engine_addrs: list[str] = opt(
        [],
        "HOST:PORT of engines that hpcrl engines serve has started, beside the run's own or in their place (docs/engines.md)",
        "slime",
    )
    rollout_external_engine_keys: str | None = opt(
        None, "directory with the keys of these engines, as they were served with"
    )
    colocate: bool = opt(False, "engines share the trainer's GPUs and take turns with it (docs/colocation.md)", "slime")
    offload_train: bool | None = opt(
        None,
        "the trainer's state lies in host memory while the engines sample; default: with --colocate",
        "slime",
    )
    offload_rollout: bool | None = opt(
        None,
        "the engines sleep, without weights and KV cache, while the trainer trains; default: with --colocate",
        "slime",
    )
    rollout_sleep_level: Literal[1, 2] | None = opt(
        None,
        "vLLM's: 1 keeps the sleeping engines' weights in host memory, 2 drops them, as the next update brings them; default: 2, "
        "with --vllm-enable-expert-parallel, or drafts of a model (--vllm-speculative-config), 1",
    )
    rank_launcher: Literal["torchrun", "ranks"] = opt(
        "torchrun",
        "torchrun: one task a host, which starts torchrun; ranks: srun or mpirun starts one task for each slot",
    )
    interface: str | None = opt(
        None, "network interface that hosts talk through, such as ib0; default: the only one they share"
    )
    launch_timeout: float = opt(120.0, "seconds until every host must have answered", gt=0)
    trainer_threads: int = opt(
        1,
        "CPU threads of one trainer rank (OMP_NUM_THREADS); --optimizer-cpu-offload takes its share of the cores if that is more",
        ge=1,
    )
    train_env_vars: dict[str, str] = opt({}, "JSON object of environment variables for the trainer ranks", "slime")
