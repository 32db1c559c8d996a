"""Qwen3-Next: gated delta nets and gated attention (`hybrid.py`), experts as Qwen3's and a shared one with a gate."""

from __future__ import annotations

from typing import Any

from hpcrl.models import qwen3_moe
from hpcrl.models.family import Config, Family
from hpcrl.models.shared import hybrid

NEEDED = (*qwen3_moe.NEEDED, "num_experts", "shared_expert_intermediate_size")


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    fields = hybrid.settings(config, needed=NEEDED)
    return fields | hybrid.experts(config, qwen3_moe.layers_with_experts(config), config["norm_topk_prob"])


FAMILY = Family(
    model_type="qwen3_next",
    transformer=transformer,
    gpt=hybrid.gpt,
    rules=(*hybrid.rules(hybrid.TOGETHER), *hybrid.EXPERTS),
    ignored=hybrid.IGNORED,
    facts=hybrid.FACTS,
    specs=tuple(
        (f"{plugins}.models.qwen3_next", "get_qwen3_next_spec") for plugins in ("slime_plugins", "vime_plugins")
    ),
)
