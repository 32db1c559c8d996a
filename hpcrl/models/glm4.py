"""GLM-4-0414 and GLM-Z1, dense: a norm before and one after each block, gate and up projection in one tensor.

Neighbouring columns of a head are rotated together, and only the first half of them; biases on queries, keys and values
as config.json says.
"""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, Rule
from hpcrl.models.shared import dense
from hpcrl.models.shared.dense import H, M


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    fields = dense.settings(config, needed=["head_dim", "attention_bias"])
    return fields | {"add_qkv_bias": config["attention_bias"], "rotary_interleaved": True}


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    return dense.gpt(config, share=0.5)


def adapt(spec: Any, norm: type, config: Any) -> None:
    """Put the norms behind attention and MLP into a layer's spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.models.shared._sandwich import NormThenAdd

    for name in ("self_attn_bda", "mlp_bda"):
        setattr(spec.submodules, name, ModuleSpec(module=NormThenAdd, params={"config": config, "norm": norm}))


FAMILY = Family(
    model_type="glm4",
    transformer=transformer,
    gpt=gpt,
    rules=(
        *dense.EMBEDDINGS,
        *dense.ATTENTION,
        Rule(M + "self_attn_bda.norm.weight", "same", (H + "post_self_attn_layernorm.weight",)),
        dense.FUSED_NORM,
        Rule(M + "mlp.linear_fc1.weight", "fused_gate_up", (H + "mlp.gate_up_proj.weight",)),
        dense.DOWN,
        Rule(M + "mlp_bda.norm.weight", "same", (H + "post_mlp_layernorm.weight",)),
    ),
    adapt=adapt,
    facts={"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
    specs=tuple((f"{plugins}.models.glm4", "get_glm_spec") for plugins in ("slime_plugins", "vime_plugins")),
)
