"""Micro-batches through the model: Megatron's schedule, with and without a backward pass.

Invariant: a pass sees packed sequences as the attention does, and only rows that are trained on get logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from hpcrl.config.options import Options
from hpcrl.trainer.lora.layer import switched
from hpcrl.trainer.megatron.model import Policy, inner
from hpcrl.trainer.megatron.output_head import Head, apart
from hpcrl.trainer.megatron.packed_attention import boundaries
from hpcrl.trainer.megatron.replaced import known_shapes
from hpcrl.trainer.step.packing import Packed
from hpcrl.trainer.step.routing_replay import Difference, How, routed
from hpcrl.trainer.step.token_logprobs import TokenScores, Vocabulary, tokens_of


def run(
    policy: Policy,
    micro_batches: Sequence[Packed],
    body: Callable[..., Any],
    forward_only: bool,
    experts: How = "own",
    difference: Difference | None = None,
) -> list[Any]:
    """Megatron's schedule over the micro-batches; what `body` gave of each, on the last pipeline stage.

    Args:
        body: takes the micro-batch, the head with its hidden states, and Megatron's output, in which is nothing.
        experts: whose choice of experts, and whether it is recorded.
        difference: where to count what a replay changes.
    """

    def forward(batches: Iterator[Packed], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        packed = next(batches)
        with apart(inner(model), packed.rows) as head:
            sequences = boundaries(packed.bounds, packed.ends, packed.longest)
            output = model(packed.tokens, packed.positions, None, packed_seq_params=sequences)
        return output, partial(body, packed, head)

    routing = routed(policy, micro_batches, experts, not forward_only, difference)
    drops = not forward_only and policy.lora and policy.lora.dropout
    dropout = switched(policy.modules, "training", True) if drops else nullcontext()
    with routing, dropout, _shapes(policy, micro_batches):
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in policy.chunks],  # each chunk sees every micro-batch, in order
            model=list(policy.chunks),
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.size(1),  # unread, with variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    for module in policy.modules:
        module.set_input_tensor(None)  # the last one, which a stage would keep until the next pass
    return found


def _shapes(policy: Policy, micro_batches: Sequence[Packed]) -> AbstractContextManager[None]:
    """What is known of the shapes that go between pipeline stages in a pass; with virtual stages nothing."""
    config = policy.config
    if config.virtual_pipeline_model_parallel_size is not None:
        return nullcontext()
    parts = policy.ranks.tp_size if config.sequence_parallel else 1
    return known_shapes([packed.tokens.size(1) // parts for packed in micro_batches], config.hidden_size)


def vocabulary_of(policy: Policy) -> Vocabulary:
    """Which columns this rank's logits are."""
    group = parallel_state.get_tensor_model_parallel_group() if policy.ranks.tp_size > 1 else None
    return Vocabulary(policy.vocab_size, group)


def tokens_under(policy: Policy, options: Options, packed: Packed, head: Head) -> TokenScores:
    """What the model says of the tokens that are trained on."""
    assert head.hidden is not None
    vocabulary = vocabulary_of(policy)
    rows = options.log_probs_chunk_size
    temperature = options.rollout_temperature
    return tokens_of(head.hidden, packed.labels, head.logits, vocabulary, temperature, rows, packed.teacher)


@torch.no_grad()
def _forward(
    policy: Policy, micro_batches: Sequence[Packed], found: Callable[[Packed, Head], torch.Tensor], experts: How = "own"
) -> list[torch.Tensor]:
    """What `found` gives for each micro-batch under the current weights; zeros [r] before the last pipeline stage."""

    def body(packed: Packed, head: Head, _: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return found(packed, head)

    every = run(policy, micro_batches, body, forward_only=True, experts=experts)
    return every if policy.ranks.last_stage else [torch.zeros_like(packed.rollout) for packed in micro_batches]


def logprobs(
    policy: Policy, options: Options, micro_batches: Sequence[Packed], experts: How = "own"
) -> list[torch.Tensor]:
    """Log-probs [r] of each micro-batch; zeros on all pipeline stages but the last.

    Args:
        experts: as in `run`.
    """
    return _forward(policy, micro_batches, lambda *of: tokens_under(policy, options, *of).logprobs, experts)


def hidden_states(policy: Policy, micro_batches: Sequence[Packed]) -> list[torch.Tensor]:
    """What goes into the last stage's output layer at the rows of each micro-batch: [r, 1, hidden size] on the host."""
    # read by copies back, which come after it
    return _forward(policy, micro_batches, lambda _, head: head.hidden.to("cpu", non_blocking=True))


def output_weight(policy: Policy) -> torch.Tensor | None:
    """The output layer's weight, this rank's columns; None on all pipeline stages but the last."""
    if not policy.ranks.last_stage:
        return None
    (model,) = (inner(chunk) for chunk in policy.chunks if inner(chunk).post_process)
    own = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if own else model.output_layer.weight


def values_under(head: Head) -> torch.Tensor:
    """A critic's values of the rows that are trained on, float32 [r]: of the state before the token that each
    predicts."""
    assert head.hidden is not None
    return head.logits(head.hidden).squeeze(1)


def values(critic: Policy, micro_batches: Sequence[Packed]) -> list[torch.Tensor]:
    """Values [r] of each micro-batch; zeros on all pipeline stages but the last."""
    return _forward(critic, micro_batches, lambda _, head: values_under(head))
