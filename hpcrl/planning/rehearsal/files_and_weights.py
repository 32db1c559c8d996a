"""What a rehearsed rank does with its state: it loads a checkpoint of which nothing is read, and puts its weights where
an update of the engines sends them from.

Invariant: each tensor of a rank is touched once, by the functions of a run.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def load_nothing(policy: Any) -> None:
    """Load a checkpoint of which nothing is read: every tensor is where it belongs, as the files' are at the end."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedBase,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
    )

    from hpcrl.trainer.checkpoint import save_load

    def read(request: Any, *_: Any) -> Any:
        halved, _ = extract_matching_values(request, lambda v: isinstance(v, ShardedTensorFactory), True)
        apply_factories(request)
        return apply_factory_merges(dict_list_map_outplace(here, request), halved)

    def here(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return value.data if isinstance(value, ShardedBase) else value

    stored = SimpleNamespace(holds=lambda _: False)
    with mock.patch.multiple(save_load, open_stored=lambda *_: stored, read=read):
        save_load.load_state(policy, policy.ranks, Path("a checkpoint"))


def export(policy: Any, buffer: int) -> int:
    """Write every tensor of a rank into memory that pieces are sent from, of which an update of `buffer` bytes has two;
    the elements that were written.

    Args:
        policy: the part of it that is sent (`weight_export.sent_part`).
    """
    import torch

    from hpcrl.models.slicing import CUTS
    from hpcrl.trainer.lora.merged import sent_values
    from hpcrl.trainer.megatron import parameter_shards
    from hpcrl.weights.pieces.elements import OwnTensor, PieceValues

    memory = torch.empty(buffer // 2, dtype=torch.bfloat16, device=next(policy.modules[0].parameters()).device)
    written = 0
    value = sent_values(policy)
    for rule, parameter in parameter_shards.own_parameters(policy).values():
        part = policy.ranks.tp_rank if rule.expert is None else policy.ranks.etp_rank
        places = CUTS[rule.kind].places(part, tuple(parameter.shape), parameter_shards.shapes_of(policy, rule))
        own = {name: OwnTensor(parameter, places, which, (), value) for which, name in enumerate(rule.hf)}
        values = PieceValues(own, dict.fromkeys(own, "BF16"), None, {})
        for place in places:
            columns = place.columns or (0, parameter.shape[1] if parameter.dim() > 1 else 1)
            width = columns[1] - columns[0]
            most = max(1, memory.numel() // width)
            for first in range(place.rows[0], place.rows[1], most):
                last = min(first + most, place.rows[1])
                out = memory[: (last - first) * width].view(last - first, width)
                values.write(rule.hf[place.tensor], (first, last, *columns), out)
                written += (last - first) * width
    return written
