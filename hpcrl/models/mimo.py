"""MiMo-7B: Qwen2's layers, and behind the last one a layer that predicts a further token.

That layer takes the hidden states as they are before the model's last norm (as in vLLM's model of it), and its matrix
has their columns before the embedding's, the other way round than Megatron's.
"""

from __future__ import annotations

from typing import Any

from hpcrl.models import qwen2
from hpcrl.models.family import Config, Family, refuse
from hpcrl.models.shared import dense, mtp


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    refuse(config, {"attention_bias": [True]})
    return qwen2.transformer(config)


FAMILY = Family(
    model_type="mimo",
    transformer=transformer,
    gpt=dense.gpt,
    rules=dense.RULES,
    heads=mtp.heads(
        dense.RULES,
        "dense",
        "model.mtp_layers.{layer}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "column_swapped",
    ),
    heads_before_norm=True,
    ignored=(r".*rotary_emb\.inv_freq", r"model\.mtp_layers\..*"),
)
