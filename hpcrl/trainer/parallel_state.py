"""Devices and process groups of the trainer: torch.distributed, Megatron's parallel state, seeds, determinism.

Invariants: a rank learns its place from torchrun's environment and the options alone; another number of ranks than the
options ask for is refused before any group is made; a GPU that is present is used, or it is an error that it cannot be.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.groups import planned
from hpcrl.plan import NO_GPUS
from hpcrl.trainer.collectives import connect_when_needed
from hpcrl.transport.pickles.torch_patches import refuse_foreign_pickles
from hpcrl.utils.cpus import SYSTEM, bind_beside


@dataclass(frozen=True)
class Ranks:
    """This process's place: global rank, and rank and size in each kind of parallelism.

    Experts are laid over the same ranks in their own way: etp ranks share one expert, ep ranks share out the
    experts of a layer.

    Attributes:
        stages: the ranks of this one's pipeline over gloo, for what is in host memory anyway; None where there is one
            stage.
    """

    rank: int
    world: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    device: torch.device
    stages: dist.ProcessGroup | None = None

    @property
    def first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the output layer: it computes the loss."""
        return self.pp_rank == self.pp_size - 1


def initialize(options: Options, store: dist.Store | None = None) -> Ranks:
    """Join the process groups as torchrun's environment says; gloo on the CPU, NCCL with CUDA.

    Args:
        store: where the ranks meet (default: as torchrun's environment says).

    Raises:
        UsageError: if the world is not what the options ask for, or there are GPUs that torch cannot use.
        HpcrlError: if torchrun's variables are missing.
    """
    rank, world, local = (_variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != options.world_size:
        asked = (
            f"--actor-num-nodes {options.actor_num_nodes} x --actor-num-gpus-per-node {options.actor_num_gpus_per_node}"
        )
        raise UsageError(f"{asked} asks for {options.world_size} trainer ranks, torchrun started {world}")
    cuda = cuda_is_there(os.environ.get("CUDA_VISIBLE_DEVICES"))
    device = torch.device("cuda", device_index(local, torch.cuda.device_count())) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        stay_beside(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(minutes=options.distributed_timeout_minutes)
    refuse_foreign_pickles()
    store = None if store is None else dist.PrefixStore("groups", store)
    connect_when_needed()
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_size,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )
    ranks = Ranks(
        rank=rank,
        world=world,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        device=device,
        stages=_stages(options, timeout),
    )
    seed_rank(options.seed, ranks)
    if options.deterministic_mode:
        torch.use_deterministic_algorithms(True)  # `torchrun.prepare_environment` has told the libraries
        torch.backends.cudnn.benchmark = False
    return ranks


def _stages(options: Options, timeout: timedelta) -> dist.ProcessGroup | None:
    if options.pipeline_model_parallel_size == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(planned(options)["pp"], timeout=timeout, backend="gloo")
    return mine


def shutdown() -> None:
    """Leave all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise HpcrlError(f"the environment has no {name}", "trainer ranks are started by torchrun") from None


def seed_rank(seed: int, ranks: Ranks) -> None:
    """Begin this rank's random numbers, by Megatron-LM's rule: pipeline stages differ, tensor-parallel ranks differ
    where they must, data-parallel ones are alike."""
    seed += 100 * ranks.pp_rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def cuda_is_there(visible: str | None) -> bool:
    """Whether to compute on GPUs.

    Args:
        visible: CUDA_VISIBLE_DEVICES.

    Raises:
        UsageError: with torch's own reason, if it names GPUs, torch is a CUDA build, and yet none can be used, as with
            too old a driver: the run would continue, a thousand times slower.
    """
    if torch.cuda.is_available():
        return True
    if torch.version.cuda and visible is not None and visible not in NO_GPUS:
        try:
            torch.cuda.init()
            reason = "torch finds no device"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
        raise UsageError(
            f"this host gives the trainer GPUs (CUDA_VISIBLE_DEVICES={visible}), and CUDA {torch.version.cuda} cannot "
            f"use them: {reason}",
            "does nvidia-smi work here, and is its driver new enough (docs/install.md)? HPCRL_ON_CPUS=1 runs on the "
            "CPU",
        )
    return False


def device_index(local: int, count: int) -> int:
    """The number of a rank's GPU among the `count` that it sees: its local rank, or 0 where it is bound to its own."""
    return 0 if count == 1 else local


def stay_beside(device: torch.device, system: Path = SYSTEM) -> frozenset[int]:
    """Keep this process on the processors of its GPU's NUMA node; which these are, none if nothing was changed."""
    found = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # of AMD's, with some builds
        return frozenset()
    return bind_beside(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0", system)
