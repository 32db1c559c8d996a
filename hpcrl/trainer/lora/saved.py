"""What a checkpoint of a run with adapters holds in the place of the model: the adapters, and what else is trained.

Each tensor has Megatron's name in the whole model as its key, cut along the axis that tensor-parallel ranks cut, so
that it loads in any other layout; of a fused gate and up projection, B is stored in its two halves, as Megatron stores
such a matrix.

Invariant: no weight of the base is in it; which base it belongs to, `base_digest` tells.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from hpcrl.errors import DataError
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.models.lora.matrices import is_adapter
from hpcrl.models.lora.peft import bit_sums, digest_of
from hpcrl.models.slicing import CUTS
from hpcrl.trainer.global_names import in_whole_model
from hpcrl.trainer.lora.layer import Adapter, adapters_of
from hpcrl.trainer.megatron.parameter_shards import held_table, own_parameters, shapes_of
from hpcrl.trainer.parallel_state import Ranks

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

#: fields of an adapter's record that must be this run's, and the flags that give them
FLAGS = {
    "rank": "--lora-rank",
    "alpha": "--lora-alpha",
    "rank_stabilized": "--use-rslora",
    "shared_inputs": "--lora-type",
    "targets": "--target-modules",
    "excluded": "--exclude-modules",
}
#: kinds of B that lie in two halves, and of each half this rank's part
HALVES = ("gate_up", "fused_gate_up")
ADAPTER = "adapter"  #: the key of `adapter_record` in a checkpoint
WHOLE = ("same", "over_heads")  #: kinds that every rank holds whole


def sharded_adapters(module: GPTModel, ranks: Ranks) -> dict[str, Any]:
    """Name in this chunk -> Megatron's description of the tensor for a checkpoint."""
    found: dict[str, Any] = {}
    for place, adapter in adapters_of(module):
        for name, parameter, rule in adapter.by_rule():
            key = in_whole_model(module, f"{place}.{name}", ranks)
            found[f"{place}.{name}"] = _sharded(key, parameter, rule.kind, adapter)
    return found


def trained_tensors(module: GPTModel, policy: Policy, metadata: dict[str, Any]) -> dict[str, Any]:
    """The same of all that is trained in a chunk: its adapters, and a critic's head.

    Args:
        metadata: for Megatron's `sharded_state_dict`.
    """
    found = sharded_adapters(module, policy.ranks)
    if policy.value_head:
        head = module.sharded_state_dict(metadata=metadata)
        found |= {name: part for name, part in head.items() if name.startswith("output_layer.")}
    return found


def _sharded(key: str, parameter: torch.nn.Parameter, kind: str, adapter: Adapter) -> Any:
    rank, size = adapter.group.rank(), adapter.group.size()
    group = (
        parallel_state.get_expert_data_parallel_group()
        if adapter.is_expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    copy = dist.get_rank(group)
    if kind == "same" or size == 1:
        whole = ShardedTensor.from_rank_offsets(key, parameter, replica_id=(0, rank, copy))
    else:
        axis = 1 if kind == "row" else 0
        whole = ShardedTensor.from_rank_offsets(key, parameter, (axis, rank, size), replica_id=(0, 0, copy))
    return apply_swiglu_sharded_factory(whole, ()) if kind in HALVES else whole


def adapter_record(policy: Policy) -> dict[str, Any]:
    """What a checkpoint says of its adapter: its settings, and the digest of its base."""
    assert policy.lora is not None
    return {**asdict(policy.lora), "base": policy.base.digest, "over": policy.base.path}


def refuse_adapter(stored: TorchDist) -> None:
    """Raise DataError for a checkpoint that holds an adapter, where a model is wanted."""
    if stored.tensors and all(map(is_adapter, stored.tensors)):
        raise DataError(
            f"{stored.path} holds an adapter and no model",
            "to resume, give its --lora-rank; hpcrl convert to-hf makes files of it for --lora-adapter-path",
        )


def check_same_adapter(policy: Policy, record: dict[str, Any] | None, path: Path) -> None:
    """Raise DataError if what a checkpoint says of its adapter is not what this run has."""
    if record is None:
        raise DataError(f"{path} holds all weights, this run trains an adapter", "leave out --lora-rank")
    own = adapter_record(policy)
    for name, flag in FLAGS.items():
        if name in record and _list_of(record[name]) != _list_of(own[name]):
            raise DataError(
                f"{path} has an adapter with {flag} {record[name]}, this run {own[name]}", f"give the same {flag}"
            )
    if record.get("base") != own["base"]:
        raise DataError(
            f"{path} has an adapter of another base than this run's weights",
            "give the --hf-checkpoint, --load or --ref-load that it was trained over",
        )


def _list_of(value: Any) -> Any:
    """A tuple, which a file may have made a list of, as a list."""
    return list(value) if isinstance(value, tuple) else value


@torch.no_grad()
def base_digest(policy: Policy) -> str:
    """What tells a base from another: hex, the same in every layout and dtype that holds the same values; collective.

    Made of the sum of all numbers' bits (as fp32) and of the sum of their squares, tensor by tensor.
    """
    base = replace(policy.with_part("model"), heads=0)
    mine = own_parameters(base)
    rank = policy.ranks.rank
    table = held_table(base)
    names = sorted({name for held in table for name in held.rule.hf})
    row = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.int64)
    done: set[str] = set()
    for held in table:
        if held.rule.hf[0] in done:  # a tied output layer
            continue
        done |= {*held.rule.hf}
        part = next((number for number, owner in enumerate(held.owners) if owner == rank), None)
        if part is None or (held.rule.kind in WHOLE and part):
            continue
        parameter = mine[held.rule.megatron][1]
        for place in CUTS[held.rule.kind].places(part, held.shape, shapes_of(base, held.rule)):
            sums[row[held.rule.hf[place.tensor]]] += torch.tensor(bit_sums(parameter[place.inside]))
    sums = sums.to(policy.ranks.device)
    dist.all_reduce(sums)
    return digest_of(zip(names, sums.tolist(), strict=True))
