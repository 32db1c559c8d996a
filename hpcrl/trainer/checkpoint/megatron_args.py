"""What Megatron-LM and slime look for in a checkpoint beside the tensors: its `args`.

Invariant: only plain values in an argparse.Namespace, which Megatron-core reads without unpickling anything else.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

#: fields of TransformerConfig under the names of Megatron-LM's arguments
SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "add_qkv_bias",
    "qk_layernorm",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "bf16",
)
PLAIN = (bool, int, float, str, list, tuple, type(None))


def megatron_args(policy: Any, padded_vocab_size: int) -> Namespace:
    """The arguments with which Megatron-LM would have made this checkpoint, as far as a reader asks for them.

    policy: hpcrl.trainer.megatron.model.Policy.  `world_size` is left out on purpose: Megatron-LM then expects no state
    of its own fault detection, which we do not keep.
    """
    config = policy.config
    values = {name: getattr(config, name) for name in SAME if isinstance(getattr(config, name, None), PLAIN)}
    gpt = policy.family.gpt(policy.hf_config)
    return Namespace(
        **values,
        num_experts=config.num_moe_experts,
        norm_epsilon=config.layernorm_epsilon,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        swiglu=bool(config.gated_linear_unit),
        add_bias_linear=config.add_bias_linear,
        add_position_embedding=False,
        position_embedding_type=gpt.get("position_embedding_type", "rope"),
        rotary_base=gpt.get("rotary_base", 10000),
        rotary_percent=gpt.get("rotary_percent", 1.0),
        untie_embeddings_and_output_weights=not gpt.get("share_embeddings_and_output_weights", False),
        max_position_embeddings=policy.hf_config.get("max_position_embeddings"),
        padded_vocab_size=padded_vocab_size,
        vocab_size=policy.vocab_size,
        make_vocab_size_divisible_by=1,
        tokenizer_type="HuggingFaceTokenizer",
        data_parallel_size=policy.ranks.dp_size,
        data_parallel_random_init=False,
        fp16=False,
        params_dtype=str(config.params_dtype).removeprefix("torch."),
        use_distributed_optimizer=True,
        ckpt_format="torch_dist",
        consumed_train_samples=0,  # of Megatron-LM's own data, with which it would begin anew
        skipped_train_samples=0,
        consumed_valid_samples=0,
        no_save_optim=False,
        no_save_rng=False,
    )
