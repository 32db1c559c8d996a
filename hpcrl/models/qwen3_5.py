"""Qwen3.5 and 3.6, the model of text: gated delta nets and gated attention (`hybrid.py`), the delta nets' input
projection in four tensors; dense, or with experts and a shared one with a gate.

Published models also see images; their config.json has the model of text in `text_config` (`read_config` takes it out)
and its tensors under `model.language_model`, those of a layer's experts in one.  The vision part is neither trained nor
sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcrl.models.family import Config, Family
from hpcrl.models.shared import hybrid

SPECS = tuple((f"{plugins}.models.qwen3_5", "get_qwen3_5_spec") for plugins in ("slime_plugins", "vime_plugins"))
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def dense(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    return hybrid.settings(config)


def sparse(config: Config) -> dict[str, Any]:
    """config.json of a model with experts in every layer -> fields of Megatron's TransformerConfig."""
    # there is no dense MLP; slime's flags name an expert's size for it
    config = {**config, "intermediate_size": config.get("moe_intermediate_size")}
    fields = hybrid.settings(config, needed=EXPERTS)
    return fields | hybrid.experts(config, [True] * config["num_hidden_layers"], normed=True)


def with_images(text: Family, engine_class: str) -> Family:
    """The family of the published models whose text part is `text`."""
    rules = tuple(
        replace(rule, hf=tuple(name.replace("model.", "model.language_model.", 1) for name in rule.hf))
        for rule in text.rules
    )
    return replace(text, model_type=text.model_type.removesuffix("_text"), rules=rules, engine_class=engine_class)


TEXT = Family(
    model_type="qwen3_5_text",
    transformer=dense,
    gpt=hybrid.gpt,
    rules=hybrid.rules(hybrid.APART),
    ignored=hybrid.IGNORED,
    facts=hybrid.FACTS,
    specs=SPECS,
)
SPARSE_TEXT = replace(
    TEXT,
    model_type="qwen3_5_moe_text",
    transformer=sparse,
    rules=(*hybrid.rules(hybrid.APART), *hybrid.EXPERTS),
)
FAMILIES = (
    TEXT,
    SPARSE_TEXT,
    with_images(TEXT, "Qwen3_5ForCausalLM"),
    replace(with_images(SPARSE_TEXT, "Qwen3_5MoeForCausalLM"), stacked=True),
)
