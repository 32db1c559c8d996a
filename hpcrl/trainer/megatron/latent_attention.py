"""Megatron's multi-head latent attention: layers as the spec names them, and what is ours without Transformer Engine.

Megatron's local layers split the two down projections over tensor-parallel ranks and gather what they give; each rank
then sees of the rotated keys' gradient only what its own heads say, and nothing adds these up.  Transformer Engine's
hold the projections whole on every rank.  So do ours, on a rank's own rows of a sequence: Megatron gathers the keys,
and their gradients are added on the way back.

Invariants: parameters and names in checkpoints are those of Transformer Engine's layers; with tensor parallelism rows
are split over the ranks (sequence parallelism), which every model with experts needs (`models/divisions.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

#: local name -> Transformer Engine's, which puts a norm into the layer that follows it
LATENT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


#: layers that Megatron-core 0.19 and later would choose by itself
_CHOSEN = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class SpecifiedAttention(MLASelfAttention):
    """MLASelfAttention of just the layers that its spec names.

    Where queries have no vector of their own, Megatron-core 0.19 and later normalise the hidden state once more before
    their projection, or refuse the spec without Transformer Engine: a norm that no published model has, while
    `qk_layernorm` is needed for the one of keys and values.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _CHOSEN}

    def _run_core_attention(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> torch.Tensor:
        """Megatron-core 0.19 and later make values of packed sequences as wide as keys, and cut columns off wider ones:
        these stay as they are."""
        if value.size(-1) > query.size(-1):
            return self.core_attention(query, key, value, attention_mask, **kwargs)
        return super()._run_core_attention(query, key, value, attention_mask, **kwargs)


class ReplicatedLinear(torch.nn.Module):
    """x @ weight^T with the whole weight on every rank; its gradient is summed over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, like: torch.Tensor, rows: int) -> None:
        super().__init__()
        whole = torch.empty(rows, like.size(1), dtype=like.dtype, device=like.device)
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(whole)
        self.weight = torch.nn.Parameter(whole)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x [rows, 1, columns] -> [rows, 1, rows of the weight], and no bias."""
        return F.linear(x, self.weight), None


class LatentAttention(SpecifiedAttention):
    """The same, whose down projections are whole on every rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        sizes = {"linear_kv_down_proj": config.kv_lora_rank + config.qk_pos_emb_head_dim}
        if config.q_lora_rank is not None:
            sizes["linear_q_down_proj"] = config.q_lora_rank
        for name, rows in sizes.items():
            setattr(self, name, ReplicatedLinear(config, getattr(self, name).weight, rows))

    def _run_core_attention(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> torch.Tensor:
        """`PackedAttention` takes values as they are, narrower than keys too."""
        return self.core_attention(query, key, value, attention_mask, **kwargs)
