"""Which of a rank's experts each row that DeepEP brought is for, in place of Megatron's own function for it.

DeepEP says it as a list of numbers a row, with -1 where a choice is another rank's.  Megatron's flex dispatcher of
tokens makes a table of them with a column for each expert, and asks the device three times on the way how many numbers
are not -1: three waits of the host in every layer and pass.

Invariants: tables and gradients are Megatron's; nothing is asked of the device.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def install() -> None:
    """Let Megatron call `expert_table`."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher._DeepepManager._indices_to_multihot = expert_table


def expert_table(manager: Any, indices: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables [rows, experts]: bool which experts a row is for, and float32 their probabilities, 0 for the others.

    Args:
        manager: Megatron's; `num_local_experts` is read.
        indices: int64 [rows, choices], experts of this rank, or -1.
        probs: [rows, choices].
    """
    experts = manager.num_local_experts
    columns = torch.where(indices < 0, experts, indices)  # one more column for what is not this rank's
    empty = probs.new_zeros(len(indices), experts + 1, dtype=torch.float32)
    chosen = torch.zeros_like(empty, dtype=torch.bool).scatter(1, columns, True)
    return chosen[:, :experts], empty.scatter(1, columns, probs.float())[:, :experts]
