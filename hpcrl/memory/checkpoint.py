"""Bytes that saving and loading a checkpoint take beside everything else: a pure function of the layout.

Invariant: what is counted is what Megatron allocates for the optimizer's state as `trainer/checkpoint/save_load.py`
asks for it: gathered over gloo, on the host.  A test counts what a save puts on the GPU against it.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.memory.parameters import Count, Layout

STATE = 12  #: bytes of a parameter: its fp32 copy and Adam's two moments, in fp32 whatever they are kept in
TWICE = 8  #: of the one that is being gathered: as it comes from the ranks, and put together


def checkpoint_bytes(options: Options, count: Count, layout: Layout) -> tuple[float, float]:
    """(on the GPU, on the host a rank, averaged over those of the host that takes most), whichever of save and load
    takes more.

    A save gathers the state of all data-parallel ranks on the first; a load makes room for all of it on each.
    """
    ranks = options.actor_num_gpus_per_node
    stages = max(1, ranks * layout.pp // options.world_size)  # of the pipeline, on one host
    dense = count.dense * min(ranks, layout.tp * stages)  # on the ranks of a host that are the first to hold them
    expert = count.expert * min(ranks, layout.etp * layout.ep * stages)
    own = ranks * (count.dense / layout.copies + count.expert / layout.expert_copies)
    save = STATE * (dense + expert + own) + TWICE * max(dense, expert)
    return 0.0, max(save, STATE * ranks * count.all) / ranks
