"""Attention and norms of packed sequences: which ones a model gets, and our own without Transformer Engine.

Megatron's local DotProductAttention refuses packed sequences and context parallelism, its torch norm refuses sequence
parallelism.  Our attention is torch's scaled_dot_product_attention over the buckets that `thd.plan` makes.

Invariants: outputs and gradients depend on the sequences alone, not on how the plan batches them; the names of tensors
in a checkpoint are those that Transformer Engine's layers and slime's have, whichever machine wrote it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hpcrl.models.files.torch_dist import SANDWICH
from hpcrl.trainer.megatron import thd
from hpcrl.trainer.megatron.delta_net_layer import as_delta_net


@dataclass
class Boundaries(PackedSeqParams):
    """Megatron's own, with the boundaries on the host as well: asking the GPU for them would stop it in every layer."""

    ends: tuple[int, ...] = ()


def boundaries(bounds: torch.Tensor, ends: tuple[int, ...], longest: int) -> Boundaries:
    """What attention and rotary embedding are to know of packed sequences, padding included, over all CP ranks.

    Without `cu_seqlens_*_padded`, by which Transformer Engine would tell padding from tokens: it then has no
    FlashAttention 2 and no attention of its own left, and in deterministic mode on an H100 none at all for long
    sequences. Padding may be taken for tokens: it is after them, where causal attention never looks, and nothing is
    trained on it.

    Args:
        bounds: int32 [sequences + 1], 0 and where each ends.
        ends: the same on the host.
        longest: rows of the longest.
    """
    return Boundaries("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest, ends=ends)


Adapt = Callable[[ModuleSpec, type, TransformerConfig], None]


def use_flash_attention(query: torch.Tensor) -> bool:
    """Whether our attention calls the flash-attn package: half precision on CUDA, and it is installed."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and importlib.util.find_spec("flash_attn") is not None


def block_spec(
    config: TransformerConfig, adapt: Adapt | None = None, vp_stage: int | None = None, apart: bool = False
) -> TransformerBlockSubmodules:
    """The layers of this (virtual) pipeline stage: Transformer Engine's where installed, else Megatron's with our
    attention and norm.

    Args:
        adapt: a family's change to a layer's spec, called with (spec, norm class, config).
        apart: norms are not in the layer that follows them, so that what goes into that layer can be had.
    """
    engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    plans = thd.recent_plans()  # of the layers of this chunk
    if not engine:
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = ModuleSpec(PackedAttention, {"plans": plans})
            for owner in (layer.submodules, layer.submodules.self_attention.submodules):
                _replace_norms(owner)
        block = TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=RMSNorm)
    elif apart:
        for layer in block.layer_specs:
            norms_apart(layer.submodules, block.layer_norm)
    if linear := config.linear_attention_freq:
        numbers = layer_numbers(config, vp_stage)
        specs = zip(numbers, block.layer_specs, strict=True)
        block.layer_specs = [as_delta_net(layer, plans) if linear[number] else layer for number, layer in specs]
    if config.multi_latent_attention:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = SpecifiedAttention if engine else LatentAttention
    if adapt:
        for layer in block.layer_specs:
            adapt(layer, block.layer_norm, config)
    for layer in block.layer_specs:
        name_as_elsewhere(layer, config.multi_latent_attention)
    return block


#: a layer into which Transformer Engine puts a norm, the norm that it stands for, and whose they are
_FUSED = (
    ("self_attention", "linear_qkv", "input_layernorm"),
    ("self_attention", "linear_q_up_proj", "q_layernorm"),
    ("self_attention", "linear_kv_up_proj", "kv_layernorm"),
    ("mlp", "linear_fc1", "pre_mlp_layernorm"),
)


def norms_apart(layer: Any, norm: type) -> None:
    """Take Transformer Engine's norms out of the linear layers of one transformer layer's submodules, in place.

    Args:
        norm: of a norm on its own.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELayerNormColumnParallelLinear

    for owner, linear, name in _FUSED:
        spec = getattr(layer, owner)
        inside = getattr(spec, "submodules", None) or getattr(spec, "keywords", {}).get("submodules")
        if inside is None or getattr(inside, linear, None) is not TELayerNormColumnParallelLinear:
            continue
        setattr(inside, linear, TEColumnParallelLinear)
        where = inside if name in ("q_layernorm", "kv_layernorm") else layer
        setattr(where, name, norm)


def layer_numbers(config: TransformerConfig, vp_stage: int | None) -> Sequence[int]:
    """The numbers, in the whole model from 0 on, of the layers of this (virtual) pipeline stage."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def _replace_norms(submodules: Any) -> None:
    for name in ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm"):
        found: ModuleSpec | type | None = getattr(submodules, name, None)
        if found is WrappedTorchNorm:
            setattr(submodules, name, RMSNorm)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight carries the `sequence_parallel` mark, so that its gradient is summed over TP
    ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden], normed; times 1 + the weight, in fp32, where the model says so."""
        if not self.zero_centred:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention of packed sequences, grouped-query, under context parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        plans: Callable[..., thd.AttentionPlan],
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.plans = plans
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0 and config.softmax_type == "vanilla" and config.window_size is None, (
            "refused by settings.py"
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Boundaries | None = None,
    ) -> torch.Tensor:
        """query [t, heads, d], key [t, groups, d] and value [t, groups, v] of this CP rank's rows -> [t, heads * v].

        Where values and keys differ in size the smaller get columns of zeros: the kernels know one size of head.
        """
        assert packed_seq_params is not None, "sequences are always packed"
        size = self.cp_group.size()
        rank = self.cp_group.rank()
        width = value.size(-1)
        if width != query.size(-1):
            query, key, value = (F.pad(x, (0, max(width, query.size(-1)) - x.size(-1))) for x in (query, key, value))
        if size == 1 and use_flash_attention(query):
            out = _flash(query, key, value, packed_seq_params, self.scale, self.config.deterministic_mode)
            return out[..., :width].flatten(1)
        if size > 1:
            # forward: everybody's keys and values; backward: their gradients, summed over the ranks
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        plan = self.plans(packed_seq_params.ends, query.size(1) * query.size(2), size, rank, query.device)
        return thd.attend(query, key, value, plan, self.scale)[..., :width].flatten(1)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Boundaries, scale: float, deterministic: bool
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    cu = packed.cu_seqlens_q
    longest = packed.max_seqlen_q
    return flash_attn_varlen_func(
        query, key, value, cu, cu, longest, longest, softmax_scale=scale, causal=True, deterministic=deterministic
    )


def name_as_elsewhere(layer: Any, latent: bool = False) -> None:
    """Set the names of one layer's spec (a ModuleSpec of a TransformerLayer), in place.

    Args:
        latent: its attention is multi-head latent, where Megatron's own table is empty.
    """
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    if latent:
        names |= LATENT_NAMES
    mlp = layer.submodules.mlp  # a ModuleSpec, or since Megatron-core 0.19 a partial
    if MoELayer in (getattr(mlp, "module", None), getattr(mlp, "func", None)):
        # Megatron's table means a dense layer, whose norm Transformer Engine fuses into the MLP
        names.pop("pre_mlp_layernorm.", None)
    layer.submodules.sharded_state_dict_keys_map = names | SANDWICH


# ---- multi-head latent attention
#
# Megatron's multi-head latent attention: layers as the spec names them, and what is ours without Transformer Engine.
#
# Megatron's local layers split the two down projections over tensor-parallel ranks and gather what they give; each
# rank then sees of the rotated keys' gradient only what its own heads say, and nothing adds these up. Transformer
# Engine's hold the projections whole on every rank. So do ours, on a rank's own rows of a sequence: Megatron gathers
# the keys, and their gradients are added on the way back.
#
# Invariants: parameters and names in checkpoints are those of Transformer Engine's layers; with tensor parallelism
# rows are split over the ranks (sequence parallelism), which every model with experts needs (`models/divisions.py`).

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
