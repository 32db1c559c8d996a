"""Whether the groups that Megatron built are those of the plan.

Invariant: a rank that finds itself in another group than `hpcrl plan` printed ends the run before the first step.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.groups import planned


def verify(options: Options, rank: int) -> None:
    """HpcrlError names the group, its ranks here and those of the plan."""
    found = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "dp-cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
        "edp": parallel_state.get_expert_data_parallel_group(),
    }
    for kind, groups in planned(options).items():
        mine = next(group for group in groups if rank in group)
        built = sorted(dist.get_process_group_ranks(found[kind]))
        if built != mine:
            raise HpcrlError(
                f"rank {rank} is in {kind} group {built}, the plan says {mine}", "which Megatron-core is installed?"
            )
