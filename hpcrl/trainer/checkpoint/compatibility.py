"""Whether a checkpoint fits the model, asked before anything is loaded.

Invariant: what does not fit is one DataError, the same on all ranks, that names tensor and both values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from hpcrl.errors import DataError
from hpcrl.model_files.torch_dist import TorchDist
from hpcrl.trainer.parallel.collectives import agree, device

#: rows of an embedding that Megatron-LM may have added: its padding is to a multiple of 128 x TP
PADDING = 128 * 128
MEND = "is it a checkpoint of --hf-checkpoint's model?"


def check_fits(request: dict[str, Any], stored: TorchDist, vocab_size: int, spare: Collection[str] = ()) -> None:
    """DataError unless `stored` has every tensor that `request` asks for, in its shape, and no more of the model but
    `spare`.

    request: a state dict of Megatron's sharded tensors; what layers keep beside their weights is taken out of it where
    the checkpoint has none, because every kind of layer keeps something else.
    """
    _without_extras(request, stored)
    asked = list(_tensors(request))
    agree(lambda: _compare(asked, stored, vocab_size))
    mine = {tensor.key for tensor in asked}
    names = sorted(stored.tensors.keys() - set(spare))
    wanted = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device())
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)  # each pipeline stage asks for its own
    if extra := [name for name, found in zip(names, wanted.tolist(), strict=True) if not found]:
        more = f" and {len(extra) - 4} more" if len(extra) > 4 else ""
        raise DataError(f"{stored.path} holds {', '.join(extra[:4])}{more}, which the model has not", MEND)


def _compare(asked: list[ShardedTensor], stored: TorchDist, vocab_size: int) -> None:
    for tensor in asked:
        found = stored.all.get(tensor.key)
        wanted = tuple(tensor.global_shape)
        if found is None:
            raise DataError(f"{stored.path} has no {tensor.key}", MEND)
        if tensor.allow_shape_mismatch:  # rows of the vocabulary: padded as the saving layout wanted it
            right = found.shape[1:] == wanted[1:] and vocab_size <= found.shape[0] < vocab_size + PADDING
            wanted = (vocab_size, *wanted[1:])
        else:
            right = found.shape == wanted
        if not right:
            raise DataError(f"{stored.path}: {tensor.key} is {list(found.shape)}, the model's is {list(wanted)}", MEND)


def _tensors(request: dict[str, Any]) -> Iterator[ShardedTensor]:
    """All that will be read, without changing the request."""
    copy = dict_list_map_outplace(lambda value: value, request)
    apply_factories(copy)
    for value in nested_values(copy):
        if isinstance(value, ShardedTensor):
            yield value


def _without_extras(value: Any, stored: TorchDist) -> None:
    """Drop `_extra_state` objects that the checkpoint does not hold, in place."""
    if isinstance(value, list):
        for item in value:
            _without_extras(item, stored)
    if not isinstance(value, dict):
        return
    for key, item in list(value.items()):
        if isinstance(item, ShardedObject) and "_extra_state" in item.key and not stored.holds(item.unique_key):
            del value[key]
        else:
            _without_extras(item, stored)
