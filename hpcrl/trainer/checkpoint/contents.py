"""What a checkpoint holds in addition to the model's tensors: Megatron-LM's `args`, random-number states and the parts
of an optimizer's state; and whether its tensors fit the model.

Invariants: `args` is an argparse.Namespace of plain values, which Megatron-core reads without unpickling anything else;
all generators that Python, numpy, torch and Megatron draw from are saved and restored together; a checkpoint that does
not fit is one DataError, the same on all ranks, that names the tensor and both values, before anything is loaded.
"""

from __future__ import annotations

import random
import re
from argparse import Namespace
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from hpcrl.errors import DataError
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.trainer.collectives import agree, device
from hpcrl.trainer.parallel_state import Ranks

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
#: of multi-head latent attention, likewise
LATENT = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
PLAIN = (bool, int, float, str, list, tuple, type(None))


def megatron_args(policy: Any, padded_vocab_size: int) -> Namespace:
    """The arguments with which Megatron-LM would have made this checkpoint, as far as a reader asks for them.

    Args:
        policy: hpcrl.trainer.megatron.model.Policy. `world_size` is left out on purpose: Megatron-LM then expects no
            state of its own fault detection, which we do not keep.
    """
    config = policy.config
    values = {name: getattr(config, name) for name in SAME if isinstance(getattr(config, name, None), PLAIN)}
    if config.multi_latent_attention:
        values |= {name: getattr(config, name) for name in LATENT}
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
        consumed_train_samples=0,  # of Megatron-LM's own data, with which it would start over
        skipped_train_samples=0,
        consumed_valid_samples=0,
        no_save_optim=False,
        no_save_rng=False,
    )


def rng_object(ranks: Ranks) -> ShardedObject:
    """This rank's random-number states, as one object per (pipeline, tensor) rank, as Megatron-LM keeps them."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape = (ranks.pp_size, ranks.tp_size)
    offset = (ranks.pp_rank, ranks.tp_rank)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [mine], shape, offset, replica_id=replica)


def restore_rng(state: dict[str, Any]) -> None:
    """Set this process's generators to one such object's state."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


#: rows of an embedding that Megatron-LM may have added: its padding is to a multiple of 128 x TP
PADDING = 128 * 128
FIX = "is it a checkpoint of --hf-checkpoint's model?"
#: for layers that predict further tokens, and for what the optimizer keeps of them
FIX_HEADS = "give --mtp-num-layers and --enable-mtp-training, or leave them out, as the run did that saved it"


def fitting(request: dict[str, Any], stored: TorchDist, vocab_size: int, spare: Collection[str] = ()) -> dict[str, Any]:
    """The request, if `stored` has every tensor that it asks for, in its shape, and no more of the model but `spare`.

    Args:
        request: a state dict of Megatron's sharded tensors; `_extra_state` of layers is left out where the checkpoint
            has none, because every kind of layer keeps something else there.

    Raises:
        DataError: the same on all ranks.
    """

    def absent(value: Any) -> bool:
        return isinstance(value, ShardedObject) and "_extra_state" in value.key and not stored.holds(value.unique_key)

    _, request = extract_matching_values(request, absent)
    asked = list(_tensors(request))
    agree(lambda: _compare(asked, stored, vocab_size))
    mine = {tensor.key for tensor in asked}
    names = sorted(stored.tensors.keys() - set(spare))
    wanted = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device())
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)  # each pipeline stage asks for its own
    if extra := [name for name, found in zip(names, wanted.tolist(), strict=True) if not found]:
        more = f" and {len(extra) - 4} more" if len(extra) > 4 else ""
        raise DataError(
            f"{stored.path} holds {', '.join(extra[:4])}{more}, which the model does not have", _fix(*extra)
        )
    return request


def _compare(asked: list[ShardedTensor], stored: TorchDist, vocab_size: int) -> None:
    for tensor in asked:
        found = stored.all.get(tensor.key)
        wanted = tuple(tensor.global_shape)
        if found is None:
            raise DataError(f"{stored.path} has no {tensor.key}", _fix(tensor.key))
        if tensor.allow_shape_mismatch:  # rows of the vocabulary: padded as the saving layout wanted it
            right = found.shape[1:] == wanted[1:] and vocab_size <= found.shape[0] < vocab_size + PADDING
            wanted = (vocab_size, *wanted[1:])
        else:
            right = found.shape == wanted
        if not right:
            raise DataError(f"{stored.path}: {tensor.key} is {list(found.shape)}, the model's is {list(wanted)}", FIX)


def _fix(*names: str) -> str:
    return FIX_HEADS if all(re.search(r"(^|\.)mtp\.layers\.", name) for name in names) else FIX


def _tensors(request: dict[str, Any]) -> Iterator[ShardedTensor]:
    """All that will be read, without changing the request."""
    copy = dict_list_map_outplace(lambda value: value, request)
    apply_factories(copy)
    for value in nested_values(copy):
        if isinstance(value, ShardedTensor):
            yield value


# ---- the optimizer's parts


def optimizer_parts(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """The parts of a chained optimizer's state: one each for dense and expert parameters, or the only one."""
    numbers = sorted(key for key in optimizer if isinstance(key, int))
    return [optimizer[number] for number in numbers] or [optimizer]


def groups_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's part; those of one in fp32 that is not distributed are at its top."""
    return part.get("optimizer", part).get("param_groups", [])


def drop_classes(part: dict[str, Any]) -> None:
    """Take what is no plain value out of the parameter groups, in place.

    An optimizer that is partly on the CPU keeps there which classes it is made of: no reader of ours takes a class from
    a file or another rank, and a layout that loads it has its own.
    """
    for group in groups_of(part):
        for name in [name for name, value in group.items() if isinstance(value, type)]:
            del group[name]


def as_chained(loaded: dict[Any, Any], own: list[dict[str, Any]]) -> dict[Any, Any]:
    """What was loaded, chained as this layout's optimizer is: with expert parallelism experts have one of their own.

    Args:
        own: this optimizer's parts without the tensors, which were asked for in this layout anyway. A parameter group
            takes its numbers (learning rate, weight decay, step) from a stored one of the same kind.
    """
    leaves = [loaded, *(part for key, part in loaded.items() if isinstance(key, int))]
    stored = [group for leaf in leaves for group in groups_of(leaf)]
    parts = []
    for i, part in enumerate(own):
        for group in groups_of(part):
            same = [
                g for g in stored if all(g.get(k) == group.get(k) for k in ("wd_mult", "lr_mult", "is_decoupled_lr"))
            ]
            keep = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")
            group.update({k: v for k, v in (same or stored)[0].items() if k not in keep})
        tensors = loaded[i] if len(own) > 1 else loaded
        parts.append({**part, "param_state": tensors.get("param_state")})
    return dict(enumerate(parts)) if len(parts) > 1 else parts[0]
