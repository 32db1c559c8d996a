"""What Megatron reads from the fake device (device.py): amounts that fit together, with which its layers proceed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

#: takes the frame of its place and the tensor that is read; what there is to read
Answer = Callable[[FrameType, torch.Tensor], Any]


def balanced(total: int, parts: torch.Tensor) -> torch.Tensor:
    """`total` laid out over as many parts as evenly as it can be, in the shape of `parts`."""
    each, rest = divmod(total, parts.numel())
    return torch.tensor([each + (part < rest) for part in range(parts.numel())]).view(parts.shape)


def _of_experts(frame: FrameType, counts: torch.Tensor) -> torch.Tensor:
    """How many rows go to each expert or rank, in Megatron's dispatcher of tokens: equally many."""
    dispatcher = frame.f_locals["self"]
    if isinstance(dispatcher.num_out_tokens, torch.Tensor):  # with a capacity, rows beyond it are dropped
        kept = _within_capacity(dispatcher)
        if counts is dispatcher.num_out_tokens:
            return kept
    else:
        kept = dispatcher.num_out_tokens
    own = counts is dispatcher.input_splits or counts is dispatcher.output_splits
    return balanced(kept * (1 if own else dispatcher.tp_size), counts)


def _within_capacity(dispatcher: Any) -> int:
    """Rows of a rank that fit into the capacities of equally filled experts."""
    rows = dispatcher.routing_map.size(0) * dispatcher.config.moe_router_topk
    each = math.ceil(rows / dispatcher.num_experts * dispatcher.config.moe_expert_capacity_factor)
    return min(rows, each * dispatcher.num_experts)


def _of_gathered(frame: FrameType, read: torch.Tensor) -> Any:
    """Rows of all ranks for this one's experts, where the dispatcher gathers them; how many of them in all if their
    probabilities are asked for."""
    dispatcher = frame.f_locals["self"]
    if not hasattr(dispatcher, "local_map"):
        return None
    tokens, own = dispatcher.local_map.shape
    rows = tokens * dispatcher.config.moe_router_topk * own // dispatcher.config.num_moe_experts
    return rows if read.is_floating_point() else balanced(rows, read)


#: (end of the file's path, function) -> what is read there
MEGATRONS: dict[tuple[str, str], Answer] = {
    ("moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize"): _of_experts,
    ("moe/token_dispatcher.py", "dispatch_postprocess"): _of_gathered,
    ("moe/moe_utils.py", "permute"): lambda frame, _: int(frame.f_locals["num_out_tokens"]),
}
