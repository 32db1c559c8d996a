"""The loss of layers that predict further tokens: the cross entropy of the token after the next.

    embedding = embedding_of(policy.modules, stages)      # once for each optimizer step
    found = add_loss(policy's loss, head, packed, embedding, weights, vocabulary, options)

It is of response tokens of loss mask 1, each weighed as in the policy's loss, times --mtp-loss-scaling-factor.

Invariants: what the layers learn from enters detached (hidden states, embedding, output layer), so the gradient is of
their own parameters alone, and the policy's is bit for bit what it is without; nothing of another sequence is seen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from hpcrl.algorithms.interface import Loss, Report
from hpcrl.config.options import Options
from hpcrl.trainer.megatron.output_head import Head
from hpcrl.trainer.step.packing import FurtherTokens
from hpcrl.trainer.step.token_logprobs import Vocabulary, tokens_of

LOSS = "mtp_loss"


def add_loss(
    loss: Loss,
    head: Head,
    further: FurtherTokens,
    embedding: torch.Tensor,
    weights: torch.Tensor,
    vocabulary: Vocabulary,
    options: Options,
) -> Loss:
    """The policy's loss and theirs, which have no parameter in common.

    Args:
        embedding, vocabulary: as in `predict`.
        weights: [m], what a token of each sample counts.
    """
    entropies = -predict(further, head, embedding, vocabulary, options.log_probs_chunk_size)
    own = (entropies * weights[further.sample]).sum() * options.mtp_loss_scaling_factor
    count = entropies.new_full((), len(entropies), dtype=torch.float64)
    counted = loss.report.counted | {LOSS: (entropies.detach().double().sum(), count)}
    return Loss(loss.total + own, Report(loss.report.means, counted, loss.report.maxima))


def predict(
    further: FurtherTokens, head: Head, embedding: torch.Tensor, vocabulary: Vocabulary, rows: int
) -> torch.Tensor:
    """Log-prob [r] of each label of `further`; collective over TP.

    Args:
        head: of a pass over the same rows.
        embedding: the model's, this rank's rows of the vocabulary.
        rows: that have logits at once, as in `tokens_of`.
    """
    model = head.model
    assert head.whole is not None, "the chunk has an output layer"
    (layer,) = model.mtp.layers
    hidden = layer._proj_and_transformer_layer(
        hidden_states=head.whole, decoder_input=_embedded(model.config, embedding, further), **head.inputs
    )
    if model.output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    own = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if own else model.output_layer.weight
    fixed = weight.detach()
    found = tokens_of(
        hidden.index_select(0, further.rows),
        further.labels,
        lambda some: head.logits(some, fixed),
        vocabulary,
        1.0,
        rows,
    )
    return found.logprobs


@torch.no_grad()
def _embedded(config: TransformerConfig, weight: torch.Tensor, further: FurtherTokens) -> torch.Tensor:
    """[t, 1, hidden size], under sequence parallelism this rank's part of the rows: the embedding of each row's next
    token, 0 in the first row of a sequence, as in vLLM's models that draft."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    place = further.tokens - rank * len(weight)
    outside = (place < 0) | (place >= len(weight)) | further.first
    found = F.embedding(place.masked_fill(outside, 0), weight.detach()).masked_fill(outside[:, None], 0)[:, None]
    if size > 1:
        dist.all_reduce(found, group=parallel_state.get_tensor_model_parallel_group())
    return found.chunk(size)[rank].contiguous() if config.sequence_parallel else found
