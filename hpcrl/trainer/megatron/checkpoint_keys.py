"""Under which names a layer's tensors lie in a checkpoint: those that Transformer Engine's layers and slime's have.

Megatron's own layers, which run on a CPU, keep some tensors under other names; a checkpoint made there is read on a GPU
all the same.  Invariant: the names in a checkpoint do not depend on the machine that wrote it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from hpcrl.model_files.torch_dist import SANDWICH


def name_as_elsewhere(layer: Any) -> None:
    """Set the names of one layer's spec (a ModuleSpec of a TransformerLayer), in place."""
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    mlp = layer.submodules.mlp  # a ModuleSpec, or since Megatron-core 0.19 a partial
    if MoELayer in (getattr(mlp, "module", None), getattr(mlp, "func", None)):
        # Megatron's table means a dense layer, whose norm Transformer Engine fuses into the MLP
        names.pop("pre_mlp_layernorm.", None)
    layer.submodules.sharded_state_dict_keys_map = names | SANDWICH
