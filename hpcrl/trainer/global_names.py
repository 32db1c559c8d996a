"""The names of a rank's parameters in the whole model.

Invariant: whatever stage, virtual stage or expert-parallel rank holds a parameter, its name here is the one that rules
give it.
"""

from __future__ import annotations

import re

from megatron.core.models.gpt import GPTModel

from hpcrl.models.shared.mtp import mtp_name
from hpcrl.trainer.parallel_state import Ranks

#: a parameter of one expert, in its layer: those of Megatron's own experts, and of Transformer Engine's grouped ones
EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight|linear_fc[12]_adapter\.))(\d+)")


def in_whole_model(module: GPTModel, name: str, ranks: Ranks) -> str:
    """A parameter's name with the numbers of layer and expert in the whole model, not in its pipeline stage and EP
    rank."""
    name = mtp_name(name)
    match = re.match(r"decoder\.layers\.(\d+)\.|mtp\.layers\.\d+\.transformer_layer\.", name)
    if match is None:
        return name
    layer = match[0]
    if match[1]:
        layer = f"decoder.layers.{module.decoder.layers[int(match[1])].layer_number - 1}."
    rest = name[match.end() :]
    if expert := EXPERT.match(rest):
        first = ranks.ep_rank * (module.config.num_moe_experts // ranks.ep_size)
        rest = f"{expert[1]}{first + int(expert[2])}{rest[expert.end() :]}"
    return layer + rest
