"""GLM-4.7-Flash: the layers of DeepSeek-V3, with a list of those that have experts.

transformers reads that list, or takes the first layer alone for dense; vLLM reads first_k_dense_replace, and cannot do
without it.
"""

from __future__ import annotations

from typing import Any

from hpcrl.errors import DataError
from hpcrl.models.family import Config, Family, require
from hpcrl.models.shared import mla, mtp


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's MLATransformerConfig."""
    require(config, ("num_hidden_layers", "first_k_dense_replace"))
    layers = config["num_hidden_layers"]
    first = config["first_k_dense_replace"]
    sparse = [layer >= first for layer in range(layers)]
    kinds = config.get("mlp_layer_types") or ["sparse" if has else "dense" for has in sparse]
    if [kind == "sparse" for kind in kinds] != sparse:
        raise DataError(
            f"config.json of this glm4_moe_lite model has first_k_dense_replace = {first}, mlp_layer_types = {kinds}",
            "they must say the same of all its layers",
        )
    return mla.settings(config, sparse)


FAMILY = Family(
    model_type="glm4_moe_lite",
    transformer=transformer,
    gpt=mla.gpt,
    rules=mla.RULES,
    heads=mla.HEADS,
    copies=mtp.COPIES,
)
