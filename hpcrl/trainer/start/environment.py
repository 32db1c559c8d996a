"""The environment of trainer ranks, from the options and the plan.  Imports no torch: it must be set before that.

Invariants: gloo and NCCL talk over the plan's network, never over whatever interface the host's name leads to; which
GPUs there are, the process that started us has said already (launch/host.py).
"""

from __future__ import annotations

import os

from hpcrl.config.options import Options
from hpcrl.processors import cores
from hpcrl.run.gpu_environment import Where, compile_caches, missing, overruled, wanted
from hpcrl.run.role import RoleContext, say

#: where torch's flight recorder puts what it knows of NCCL's collectives when one takes too long (the rank's number is
#: added), by its name and its elder one
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def prepare_environment(context: RoleContext, ranks: tuple[int, ...]) -> None:
    """Set the environment of these ranks, which share a host; what the user has set stays, and is said."""
    threads = cpu_threads(context.options, cores(os.sched_getaffinity(0), os.environ), len(ranks))
    wishes = wanted("trainer", Where(context.options, context.plan.trainers[ranks[0]].interface, threads))
    base = {**os.environ, **context.options.train_env_vars}
    for line in overruled(wishes, base):
        say(line)
    os.environ.update(missing(wishes, base) | compile_caches(base))
    if not base.keys() & DUMPS:  # a node's /tmp may go with the job
        os.environ[DUMPS[0]] = str(context.rundir.logs / "nccl-trace-rank-")
    os.environ.update(context.options.train_env_vars)


def cpu_threads(options: Options, count: int, ranks: int) -> int:
    """Threads of one of `ranks` ranks that share `count` cores: --trainer-threads, or its share where the CPU does
    Adam's work."""
    return max(options.trainer_threads, count // ranks if options.megatron.get("optimizer_cpu_offload") else 1)
