"""Output layers: the policy's, applied only to rows that are trained on, some rows at a time; and the critic's.

    with apart(model, rows) as head:
        model(tokens, ...)               # as usual, but without logits
    logits = head.logits(head.hidden)    # or of a part of the rows, as often as needed

A prompt's rows, and padding, need no logits, and at a vocabulary of 150,000 the logits of all other rows are the
largest tensors of a step.  The critic's layer has one output for each row, in place of one for each token of the
vocabulary.

Invariants: logits and gradients are those of the whole output at the rows that are used; every tensor-parallel rank
holds the same critic's head and computes the same values and gradients, so these are not summed over TP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

#: what every layer of a chunk is called with besides hidden states
OF_LAYERS = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")


@dataclass
class Head:
    """What goes into the output layer, and its weight.

    Attributes:
        hidden: [r, 1, hidden size], what goes into the output layer at the rows, with its gradient; None where there is
            none.
        whole: hidden states of all rows, detached, for layers of the chunk that predict further tokens.
        inputs: with which its layers were called, for the same.
    """

    model: GPTModel
    hidden: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    inputs: dict[str, Any] = field(default_factory=dict)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[r, columns of this rank], in the model's dtype, of `hidden` [r, 1, hidden size]. Collective over TP in
        backward.

        Args:
            weight: another than the output layer's own.
        """
        if weight is None and self.model.share_embeddings_and_output_weights:
            weight = self.model.shared_embedding_or_output_weight()
        with _whole_rows(self.model.output_layer) as layer:
            return layer(hidden, weight=weight)[0].squeeze(1)


@contextmanager
def apart(model: GPTModel, rows: torch.Tensor) -> Iterator[Head]:
    """Inside, `model` gives logits of no row; its head then has the hidden states of `rows` (int64 [r], which of the
    t).

    Under sequence parallelism a rank has only a part of the rows until the layer gathers them: they are gathered before
    it, and the layer takes them as it does without.  A chunk without an output layer is left alone.
    """
    head = Head(model)
    if not model.post_process:
        yield head
        return

    def take(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args  # [t, 1, hidden size], of t / TP rows where they are split
        if further and not before_norm:
            head.whole = hidden.detach()
        if split:  # backward: each rank keeps its own rows of a gradient that the layer has summed
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head.hidden = hidden.index_select(0, rows)
        return head.hidden.detach()[:0], *rest

    def note(_: Any, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        head.inputs = {name: given[name] for name in OF_LAYERS if name in given}

    def keep(_: Any, args: tuple[Any, ...]) -> None:
        head.whole = args[0].detach()

    further = hasattr(model, "mtp")
    before_norm = further and model.mtp.before_norm
    split = model.output_layer.sequence_parallel
    handles = [model.output_layer.register_forward_pre_hook(take)]
    if further:
        handles.append(model.decoder.register_forward_pre_hook(note, with_kwargs=True))
    if before_norm:
        handles.append(model.decoder.final_layernorm.register_forward_pre_hook(keep))
    try:
        with _whole_rows(model.output_layer):
            yield head
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _whole_rows(layer: Any) -> Iterator[Any]:
    """The output layer as it is where every rank has all rows."""
    split = layer.sequence_parallel
    layer.sequence_parallel = False
    try:
        yield layer
    finally:
        layer.sequence_parallel = split


class ValueHead(MegatronModule):
    """weight . hidden + bias, in fp32; 0 at first.  Called as Megatron's output layer is."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        self.sequence_parallel = config.sequence_parallel  # `output_head` gathers the rows before it

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[rows, 1, 1] of [rows, 1, hidden size]."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def give_values(module: GPTModel, device: torch.device) -> None:
    """Put a value head in the place of the output layer, if the chunk has one."""
    if module.post_process:
        module.output_layer = ValueHead(module.config, device)
