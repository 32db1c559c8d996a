"""Layers that predict further tokens (`hpcrl.models.shared.mtp`) behind the trained model: Megatron's own block.

    attach(model, layers of the chunk, 1, trained=True)       # model.mtp, where the output layer is

Megatron's GPTModel is not told of them: its own loss would be of every row, and its gradient that of the policy too.
`hpcrl.trainer.step.further_tokens` has ours.

Invariants: the policy's gradient is clipped by its own norm, that of these layers by theirs; the norm of the policy's
is bit for bit the one without them, in every layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

#: of a group of the optimizer's parameters, kept in checkpoints: which it is.  Megatron writes it for a user's
#: --decoupled-lr no more, but still tells groups apart by it
MARK = "is_decoupled_lr"
#: groups of parameters that are marked
GROUPS: dict[Any, Any] = {ParamKey(name="*mtp.layers.*"): {MARK: True}}


def attach(
    model: GPTModel, layers: TransformerBlockSubmodules, count: int, trained: bool, before_norm: bool = False
) -> None:
    """Give a chunk with an output layer `count` such layers, like its last one; to others nothing.

    Args:
        trained: else they are held, loaded and saved alone.
        before_norm: see `Family.heads_before_norm`.
    """
    if not model.post_process:
        return
    config: TransformerConfig = copy.copy(model.config)
    config.mtp_num_layers = count
    engine = config.transformer_impl == "transformer_engine"
    spec = get_mtp_layer_spec(layers.layer_specs[-1], use_transformer_engine=engine)
    for name in ("enorm", "hnorm", "layer_norm"):
        setattr(spec.submodules, name, layers.layer_norm)
    block = MultiTokenPredictionBlock(
        config,
        MultiTokenPredictionBlockSubmodules([spec] * count),
        vp_stage=model.vp_stage,
        pg_collection=model.pg_collection,  # else Megatron-core 0.19 gives it no groups of experts
    )
    block.before_norm = before_norm
    model.mtp = block.requires_grad_(trained)
    _begin_buckets(model.mtp)


def _begin_buckets(block: torch.nn.Module) -> None:
    """Let the policy's parameters, which come after these in Megatron's gradient buffers, begin in a bucket of theirs.

    Else their parts of the data-parallel ranks would be cut elsewhere, and the norm of the policy's gradient, summed
    from those, be another in its last bit.  The mark is Megatron's for a parameter with its own bucket, of which
    nothing else is asked.
    """
    seen = set()
    for parameter in block.parameters():  # the last of them in a buffer is the first here; experts' have another buffer
        kind = getattr(parameter, "allreduce", True)
        if kind not in seen:
            parameter.shared_embedding = True
            seen.add(kind)


@torch.no_grad()
def embedding_of(modules: Sequence[GPTModel], stages: int) -> torch.Tensor | None:
    """The embedding's weight, this rank's rows, on the last pipeline stage; None elsewhere.  Collective over the first
    and the last stage, of which the last has no copy unless it is tied to the output layer.

    Args:
        modules: of this rank.
        stages: of the pipeline.
    """
    first, last = modules[0], modules[-1]
    if stages == 1:
        return first.embedding.word_embeddings.weight
    if not (first.pre_process or last.post_process):
        return None
    if last.share_embeddings_and_output_weights:
        return last.shared_embedding_or_output_weight() if last.post_process else None
    own = first.embedding.word_embeddings.weight.detach() if first.pre_process else None
    weight = torch.empty_like(last.output_layer.weight) if own is None else own
    source = parallel_state.get_pipeline_model_parallel_first_rank()
    dist.broadcast(weight, source, group=parallel_state.get_embedding_group())
    return weight if last.post_process else None


# ---- the optimizer's groups


def norms(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """(norm of the policy's gradient, norm of these layers'), over all ranks; collective."""
    found = []
    for heads in (False, True):
        with only(optimizer, heads):
            found.append(float(optimizer.get_grad_norm()))
    return found[0], found[1]


@contextmanager
def only(optimizer: MegatronOptimizer, heads: bool) -> Iterator[None]:
    """Inside, the optimizer has these layers' parameters alone, or all others."""
    leaves = [leaf.optimizer for leaf in getattr(optimizer, "chained_optimizers", [optimizer]) if leaf.optimizer]
    every = [leaf.param_groups for leaf in leaves]
    try:
        for leaf, groups in zip(leaves, every, strict=True):
            leaf.param_groups = [group for group in groups if bool(group.get(MARK)) == heads]
        yield
    finally:
        for leaf, groups in zip(leaves, every, strict=True):
            leaf.param_groups = groups
