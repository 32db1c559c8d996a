"""A critic's output layer: one number for each row, in place of one for each token of the vocabulary.

Invariant: every tensor-parallel rank holds the same head and computes the same values and gradients, so nothing of it
is added up over them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class ValueHead(MegatronModule):
    """weight . hidden + bias, in fp32; 0 at first.  Called as Megatron's output layer is."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        self.sequence_parallel = config.sequence_parallel  # `output_head` gathers the rows before it

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[rows, 1, 1] of [rows, 1, hidden size]."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def give_values(module: GPTModel, device: torch.device) -> None:
    """Put a value head in the place of the output layer, if the chunk has one."""
    if module.post_process:
        module.output_layer = ValueHead(module.config, device)
