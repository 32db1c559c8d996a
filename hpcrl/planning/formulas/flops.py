"""Floating-point operations of a model's passes, from config.json alone: what the trainer counts with.

    model = model_flops(family, config)
    model.forward(tokens, pairs, rows)        # rows: of the output layer
    training(...)                             # a forward and a backward pass: three times that

Counted are matrix products: of every layer's matrices, of a token's experts (the chosen ones and the shared), of the
router, of the output layer at the rows that get logits, attention's two products over the pairs that a causal mask
leaves, and a gated delta net's three with its state at every token.  A multiplication and its addition are two
operations.

Invariants: counted from the family's own rules, tensor by tensor (`hpcrl.planning.formulas.parameters`), so a family
needs no second place that knows its shape; what is computed again (recomputation, padding, blocks above the mask's
diagonal) is not counted: these are the operations that the mathematics needs, as in MFU (Chowdhery et al. 2022,
appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from hpcrl.models.family import Config, Family, LayerKind, Rule, layer_kinds
from hpcrl.models.lora.settings import LoraSettings
from hpcrl.planning.formulas.adapters import elements, matrices_by_name, of_layer
from hpcrl.planning.formulas.parameters import head_rules, layer_rules, part_shape

BACKWARD = 2  #: a backward pass is two products for each of the forward pass's


@dataclass(frozen=True)
class ModelFlops:
    """What a pass multiplies.

    Attributes:
        met: elements of the layers' matrices that one token is multiplied with.
        head: elements of the output layer.
        pair: operations of one (query, key) pair, in all layers together.
        fixed: elements of the output layer that layers which predict further tokens go through, in training alone;
            there it has no gradient.
        adapter: elements of adapters that one token is multiplied with.
        frozen: nothing but these has a gradient.
    """

    met: int
    head: int
    pair: int
    fixed: int = 0
    adapter: int = 0
    frozen: bool = False

    def forward(self, tokens: float, pairs: float, rows: float) -> float:
        """Operations of a forward pass.

        Args:
            pairs: (query, key) pairs of all samples, see `pairs`.
            rows: for which there are logits.
        """
        return 2.0 * (self.met + self.adapter) * tokens + self.pair * pairs + 2.0 * self.head * rows

    def training(self, tokens: float, pairs: float, rows: float) -> float:
        """Operations of a forward and a backward pass."""
        fixed = 2 * 2.0 * self.fixed * rows  # forward, and the gradient of what goes in
        if self.frozen:  # of matrices, that of what goes in alone
            products = 2.0 * (2 * self.met + (1 + BACKWARD) * self.adapter) * tokens + 2 * 2.0 * self.head * rows
            return products + (1 + BACKWARD) * self.pair * pairs + fixed
        return (1 + BACKWARD) * self.forward(tokens, pairs, rows) + fixed


def model_flops(family: Family, config: Config, heads: int = 0, lora: LoraSettings | None = None) -> ModelFlops:
    """What the passes of a model multiply.

    Args:
        heads: layers that predict further tokens; each has a pass through the output layer too.
        lora: the adapters that alone are trained.
    """
    fields = family.transformer(config)
    kinds = layer_kinds(fields)
    each = {kind: _met(family, config, kind) for kind in set(kinds)}
    met = sum(each[kind] for kind in kinds) + heads * _of_rules(head_rules(family, fields), config, fields)
    softmax = sum(not kind.linear for kind in kinds) + heads
    pair = 2 * fields["num_attention_heads"] * _columns(fields) * softmax
    head = config["vocab_size"] * fields["hidden_size"]
    if lora is None:
        return ModelFlops(met, head, pair, heads * head)
    known = matrices_by_name(family, config, lora)
    adapter = 0
    for layer, kind in enumerate(kinds):
        for rule, matrix in of_layer(layer_rules(family, fields, kind), layer, known):
            times = fields["moe_router_topk"] if ".experts." in rule.megatron else 1
            adapter += times * elements(matrix, part_shape(rule, fields, config["vocab_size"], 1, 1))
    return ModelFlops(met, head, pair, heads * head, adapter, frozen=True)


def _columns(fields: Mapping[str, Any]) -> int:
    """Of a key and a value of one head together."""
    if fields.get("multi_latent_attention"):
        return fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]
    return 2 * fields["kv_channels"]


def _met(family: Family, config: Config, kind: LayerKind) -> int:
    """Elements of a layer's matrices that a token meets; the state of a gated delta net counts as three of them: what
    it has at the key, what is added to it, and what the query reads.
    """
    fields = family.transformer(config)
    found = _of_rules(layer_rules(family, fields, kind), config, fields)
    if kind.linear:
        sizes = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        found += 3 * prod(fields[name] for name in sizes)
    return found


def _of_rules(rules: Iterable[Rule], config: Config, fields: Mapping[str, Any]) -> int:
    found = 0
    for rule in rules:
        shape = part_shape(rule, fields, config["vocab_size"], 1, 1)
        if len(shape) > 1:
            times = fields["moe_router_topk"] if ".experts." in rule.megatron else 1
            found += times * prod(shape)
    return found


def pairs(lengths: Iterable[float]) -> float:
    """The (query, key) pairs that a causal mask leaves of samples of these lengths."""
    return sum(length * (length + 1) / 2 for length in lengths)
