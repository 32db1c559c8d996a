"""What Megatron reads from the fake device (device.py): amounts that fit together, with which its layers proceed."""

from __future__ import annotations

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
    own = counts is dispatcher.input_splits or counts is dispatcher.output_splits
    return balanced(dispatcher.num_out_tokens * (1 if own else dispatcher.tp_size), counts)


#: (end of the file's path, function) -> what is read there
MEGATRONS: dict[tuple[str, str], Answer] = {
    ("moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize"): _of_experts,
    ("moe/moe_utils.py", "permute"): lambda frame, _: frame.f_locals["num_out_tokens"],
}
