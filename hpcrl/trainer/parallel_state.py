"""Devices and process groups of the trainer: torch.distributed, Megatron's parallel state, seeds, determinism.

Invariants: a rank learns its place from torchrun's environment and the options alone; a layout that does not divide is
refused before any group is made; a GPU that is present is used, or it is an error that it cannot be; a rank that is in
another group than `hpcrl plan` printed ends the run before the first step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpcrl.config.options import Options
from hpcrl.config.rules.layout import expert_layout
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
    check_world(options, world)
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


def check_world(options: Options, world: int) -> None:
    """Raise UsageError unless `world` ranks is what the options ask for and the layouts of the model and its experts
    divide it.
    """
    if world != options.world_size:
        asked = (
            f"--actor-num-nodes {options.actor_num_nodes} x --actor-num-gpus-per-node {options.actor_num_gpus_per_node}"
        )
        raise UsageError(f"{asked} asks for {options.world_size} trainer ranks, torchrun started {world}")
    tp = options.tensor_model_parallel_size
    pp = options.pipeline_model_parallel_size
    cp = options.context_parallel_size
    if world % (tp * pp * cp):
        raise UsageError(
            f"{world} trainer ranks cannot be divided into --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp}"
        )
    expert_layout(options)


def check_layout(options: Options, fields: Mapping[str, Any]) -> None:
    """Raise UsageError unless the model can be cut as the options ask.

    Args:
        fields: Megatron's TransformerConfig fields of the model (`Family.transformer`), with the user's own.
    """
    tp = options.tensor_model_parallel_size
    pp = options.pipeline_model_parallel_size
    columns = [("num_attention_heads", "attention heads")]
    if not all(fields.get("moe_layer_freq") or [0]):
        columns.append(("ffn_hidden_size", "MLP columns"))
    if fields.get("linear_attention_freq"):
        columns.append(("linear_num_key_heads", "key heads of linear attention"))
    if fields.get("moe_shared_expert_intermediate_size"):
        columns.append(("moe_shared_expert_intermediate_size", "columns of its shared experts"))
    for name, what in columns:
        if fields[name] % tp:
            raise UsageError(f"--tensor-model-parallel-size {tp} does not divide the model's {fields[name]} {what}")
    groups = fields["num_query_groups"]
    if groups % tp and tp % groups:
        raise UsageError(
            f"--tensor-model-parallel-size {tp} and the model's {groups} key-value heads do not divide one another"
        )
    uneven = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    if fields["num_layers"] % pp and not any(fields.get(name) for name in uneven):
        raise UsageError(
            f"--pipeline-model-parallel-size {pp} does not divide the model's {fields['num_layers']} layers",
            "set --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        )
    _check_experts_of(options, fields)


def _check_experts_of(options: Options, fields: Mapping[str, Any]) -> None:
    """Raise UsageError unless the model's experts can be cut as the options ask, and Megatron adds up all of their
    gradients.

    With EP 1 Megatron takes the experts' parameters for ordinary ones and reduces their gradients over data-parallel
    ranks only; if each tensor-parallel rank holds whole experts, for its own tokens, their gradients are never added.
    """
    tp = options.tensor_model_parallel_size
    ep = options.expert_model_parallel_size
    etp = options.expert_tensor_size
    experts = fields.get("num_moe_experts")
    if not experts:
        if ep > 1:
            raise UsageError(f"--expert-model-parallel-size {ep}: the model has no experts", "leave it out")
        return  # ETP says nothing then: slime's recipes give 1 to every model
    if ep == 1 and etp != tp:
        raise UsageError(
            f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and "
            "--expert-model-parallel-size 1: Megatron would not add up the gradients of the experts",
            "leave --expert-tensor-parallel-size out, or use expert parallelism",
        )
    if experts % ep:
        raise UsageError(f"--expert-model-parallel-size {ep} does not divide the model's {experts} experts")
    columns = fields["moe_ffn_hidden_size"]
    if columns % etp:
        what = "--expert-tensor-parallel-size" + (
            "" if options.expert_tensor_parallel_size else " (by default that of TP)"
        )
        raise UsageError(f"{what} {etp} does not divide the model's {columns} columns of an expert")
    if tp > 1 and not options.sequence_parallel:
        raise UsageError(
            f"--tensor-model-parallel-size {tp}: Megatron trains a model with experts only with sequence parallelism",
            "add --sequence-parallel",
        )


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


def verify_groups(options: Options, rank: int) -> None:
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
