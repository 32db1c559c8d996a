"""Weight updates."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.option_fields import Base, opt


class WeightOptions(Base):
    """weight updates"""

    update_weight_buffer_size: int = opt(512 * 1024**2, "bytes of one bucket", "slime", ge=1024)
    update_weights_interval: int = opt(
        1, "async and fully-async: the engines get the weights after every so many rollouts", "slime", ge=1
    )
    weight_transfer: str = opt(
        "auto",
        "shm, gloo, nccl, disk, or with --colocate on one host ipc; auto: nccl with CUDA, else or with --colocate shm on one host, "
        "gloo over several",
    )
    update_weight_disk_dir: str | None = opt(
        None, "--weight-transfer disk: a directory that trainer and engines both see; default: of the run", "slime"
    )
    weight_update: Literal["auto", "resharded", "delta", "gathered"] = opt(
        "auto",
        "resharded: every rank sends pieces to the workers that need them; delta: the same, and from the second update on only what "
        "has changed; gathered: rank 0 collects and sends whole tensors; auto: resharded where it can be, else gathered",
    )
    weight_update_check_interval: int = opt(
        100,
        "delta: after every so many updates compare by digest what the workers have put together with the trainer's weights",
        ge=1,
    )
    check_weight_update_equal: bool = opt(
        False, "after every update compare each tensor of the engine, bit for bit, with what was sent", "slime"
    )
    max_logprob_diff: float | None = opt(
        None,
        "stop when trainer and engine log-probs differ by more (mean absolute); default 1e-3 in fp32, 0.1 in bf16, and no bound "
        "with --load-debug-rollout-data",
        gt=0,
    )
