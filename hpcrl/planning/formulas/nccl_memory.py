"""Bytes that NCCL takes of a trainer rank's GPU: the buffers of every communicator that a layout makes.

Invariant: the groups are those of `hpcrl.groups`, which equal Megatron's; what a communicator takes is an allowance,
from NCCL's own defaults, which no run has confirmed.
"""

from __future__ import annotations

from hpcrl import groups
from hpcrl.config.options import Options

#: of one connection and channel: NCCL's Simple, LL and LL128 buffers as its sources have them
BUFFERS = 2**22 + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8
#: channels of a communicator, and connections of each: a ring inside a host; over hosts a ring and a tree, with buffers
#: on the GPU at both ends
INSIDE = 24 * 1
ACROSS = 16 * 4 * 2
PER_PEER = 2  #: channels to each other rank in an all-to-all


def communicators(options: Options) -> dict[str, tuple[int, bool]]:
    """kind -> (ranks, whether they are on several hosts), of those that a rank has besides itself alone."""
    found = {kind: members[0] for kind, members in groups.planned(options).items()}
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    found["world"] = list(range(options.world_size))
    if pp > 1:
        found["first and last stage"] = [found["pp"][0], found["pp"][-1]]
    if tp > 1 and pp > 1:  # else it is one of the two
        found["mp"] = [a + b for a in found["tp"] for b in found["pp"]]
    if options.context_parallel_size == 1:
        found.pop("dp-cp")  # it is dp
    a_host = options.actor_num_gpus_per_node
    return {
        kind: (len(members), len({rank // a_host for rank in members}) > 1)
        for kind, members in found.items()
        if len(members) > 1
    }


def gpu_transfer(options: Options) -> str | None:
    """How weight updates go out of GPU memory: in pieces by nccl or ipc, or whole by vllm; None: not at all."""
    on_gpus = options.bf16 and options.num_engines > 0 and options.gpu_transfer in ("nccl", "ipc", "vllm")
    return options.gpu_transfer if on_gpus else None


def update_members(options: Options) -> tuple[int, bool] | None:
    """(members, whether they are on several hosts) of the communicator that updates travel over, None for none: of all
    ranks and workers, with vllm of rank 0 and all workers, or with shared GPUs of the ranks, where these are on several
    hosts."""
    transfer = gpu_transfer(options)
    if transfer is None:
        return None
    ranks, a_host = options.world_size, options.actor_num_gpus_per_node
    if options.colocate:
        return (ranks, True) if ranks > a_host and transfer != "vllm" else None
    return (1 if transfer == "vllm" else ranks) + options.engine_gpus, True  # or on one, which takes less


def nccl_bytes(options: Options) -> float:
    """Of all communicators of a rank."""
    found = communicators(options)
    if update := update_members(options):
        found["weight update"] = update
    total = sum(ACROSS if across else INSIDE for _, across in found.values())
    if "ep" in found:
        total += (found["ep"][0] - 1) * PER_PEER
    return float(total * BUFFERS)
