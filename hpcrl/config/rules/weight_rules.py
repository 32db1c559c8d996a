"""What goes together in a weight update: pure functions of the resolved options.

Invariant: what an update cannot be, and what does nothing in it, is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.config.unknown_names import nearest
from hpcrl.errors import UsageError

#: each file is a way of --weight-transfer, named as the option's value
TRANSPORTS = Path(__file__).parents[2] / "weights" / "transports"


def check_weights(o: Options) -> None:
    """UsageError for a way of transfer that there is not, or that an update of this kind cannot take."""
    ways = ["auto", *sorted(path.stem for path in TRANSPORTS.glob("*.py") if not path.stem.startswith("_"))]
    if o.weight_transfer not in ways:
        close = nearest(o.weight_transfer, ways)
        raise UsageError(
            f"--weight-transfer {o.weight_transfer} is no way of transfer",
            f"did you mean {close}?" if close else f"there are {', '.join(ways)}",
        )
    if o.weight_update == "delta" and o.weight_transfer == "nccl":
        raise UsageError(
            "--weight-update delta finds and keeps what has changed in the host's memory, --weight-transfer nccl sends from the GPU's",
            "give --weight-update auto or resharded, or --weight-transfer gloo",
        )
    if o.weight_update in ("resharded", "delta") and o.weight_transfer == "disk":
        raise UsageError(
            f"--weight-update {o.weight_update}: what goes over --weight-transfer disk is whole tensors",
            "leave one of them out",
        )
    if o.weight_transfer == "ipc":
        _check_ipc(o)
    pieces = o.weight_update in ("resharded", "delta")
    if (parts := o.engine_data_parallel_size) > 1 and (pieces or o.weight_transfer == "ipc"):
        flag, value = ("--weight-update", o.weight_update) if pieces else ("--weight-transfer", o.weight_transfer)
        raise UsageError(
            f"{flag} {value} and --vllm-data-parallel-size {parts} (slime's --sglang-dp-size) exclude each other: of an engine's"
            " data-parallel parts, vLLM lets only the first tell what it holds",
            f"give {flag} auto",
        )


def _check_ipc(o: Options) -> None:
    """UsageError where a trainer rank's memory cannot be opened by all engines, or would not be all that they need."""
    if not o.colocate:
        raise UsageError(
            "--weight-transfer ipc is for engines on the trainer's GPUs, and --colocate is not given",
            "give --colocate, or --weight-transfer auto",
        )
    if o.actor_num_nodes > 1:
        raise UsageError(
            f"--weight-transfer ipc: no GPU's memory can be opened from another host, and --actor-num-nodes is {o.actor_num_nodes}",
            "use --weight-transfer auto, or one node",
        )
    if o.weight_update in ("gathered", "delta"):
        raise UsageError(
            f"--weight-update {o.weight_update}: what goes over --weight-transfer ipc is pieces, whole, from the GPU's memory",
            "give --weight-update auto or resharded, or --weight-transfer shm",
        )


def inert_in_weights(o: Options) -> Iterator[tuple[str, str]]:
    """(options, why they do nothing)"""
    if o.weight_transfer != "disk":
        yield "update_weight_disk_dir custom_update_weight_post_write_path", f"--weight-transfer is {o.weight_transfer}"
    if o.weight_update != "delta":
        yield "weight_update_check_interval", f"--weight-update is {o.weight_update}"
