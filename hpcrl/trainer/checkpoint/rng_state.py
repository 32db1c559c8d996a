"""Random-number states of a rank, in and out of checkpoints.

Invariant: all generators that Python, numpy, torch and Megatron draw from, together.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from hpcrl.trainer.parallel.parallel_state import Ranks


def as_object(ranks: Ranks) -> ShardedObject:
    """This rank's random-number states, as one object per (pipeline, tensor) rank, as Megatron-LM keeps them."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape = (ranks.pp_size, ranks.tp_size)
    offset = (ranks.pp_rank, ranks.tp_rank)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [mine], shape, offset, replica_id=replica)


def restore(state: dict[str, Any]) -> None:
    """Set this process's generators to one such object's state."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
