"""The environment of trainer ranks, from the options and the plan.  Imports no torch: it must be set before that.

Invariants: gloo and NCCL talk over the plan's network, never over whatever interface the host's name leads to; which GPUs
there are, the process that started us has said already (launch/host.py).
"""

from __future__ import annotations

import os

from hpcrl.config.options import Options
from hpcrl.plan import socket_names
from hpcrl.run.gpu_environment import compile_caches, deterministic_nccl
from hpcrl.run.role import RoleContext


def prepare_environment(context: RoleContext, ranks: tuple[int, ...]) -> None:
    """Set the environment of these ranks, which share a host; what the user has set stays, where that is safe."""
    threads = cpu_threads(context.options, len(os.sched_getaffinity(0)), len(ranks))
    wishes = {"OMP_NUM_THREADS": str(threads), **socket_names(context.plan.trainers[ranks[0]]), **for_megatron(context.options)}
    wishes |= compile_caches(os.environ)
    # torch.load reads plain values wherever it is called, Megatron's checkpoints and torch's collectives included
    wishes["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    for name, value in wishes.items():
        os.environ.setdefault(name, value)
    os.environ.update(context.options.train_env_vars)


def cpu_threads(options: Options, cores: int, ranks: int) -> int:
    """Threads of one of `ranks` ranks that share `cores` cores: --trainer-threads, or its share where the CPU does Adam's work."""
    return max(options.trainer_threads, cores // ranks if options.megatron.get("optimizer_cpu_offload") else 1)


def for_megatron(options: Options) -> dict[str, str]:
    """What Megatron, Transformer Engine and cuBLAS read when they are first used."""
    found = {}
    if options.tensor_model_parallel_size > 1 or options.context_parallel_size > 1:
        # One hardware queue: kernels start in the order of their launch.  Megatron counts on it to start the collectives of
        # tensor and context parallelism before the GEMMs that hide them; with more queues they may come last.  Not wanted
        # without them: expert parallelism and the gradients' reduction run beside GEMMs only with several queues.
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if options.deterministic_mode:
        found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it
        found["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention
    return found | deterministic_nccl(options)
