"""Into which shapes a run can be cut: a pure function of the model's sizes, the GPUs of a node and how many nodes.

    for count in node_counts(8, own=2): ...
    for layout in layouts(fields, gpus=16, node=8): ...

Invariant: a layout that is proposed divides ranks, heads, layers and experts; tensor parallelism stays inside a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options

#: options that a shape is made of, in the order in which they are shown and written
KEYS = (
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "colocate",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
PARTS = "data_parallel_size"  #: vLLM's, which goes with an engine's size
ALL_COUNTS = 8  #: up to here every number of nodes is tried, beyond it powers of two and three times such


@dataclass(frozen=True)
class TrainerLayout:
    """How the trainer's ranks are divided; `ep` is 1 without experts."""

    tp: int
    pp: int
    cp: int
    ep: int

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"


@dataclass(frozen=True)
class RunShape:
    """What a run asks for, and how it is divided.

    Attributes:
        trainers: nodes with trainer ranks; each: ranks on each of them.
        engine_gpus: of all engines.
        engine: GPUs of one.
        parts: into how many an engine divides its requests.
        shared: engines take turns with the trainer on its GPUs.
    """

    trainers: int
    each: int
    layout: TrainerLayout
    engine_gpus: int
    engine: int
    parts: int
    shared: bool

    @property
    def ranks(self) -> int:
        return self.trainers * self.each

    def settings(self, base: Options) -> dict[str, Any]:
        """The options that make `base` of this shape, tables as flags have them."""
        layout = self.layout
        spread = layout.tp > 1 and (base.sequence_parallel or base.tensor_model_parallel_size == 1)
        values = (
            self.trainers,
            self.each,
            self.shared,
            self.engine_gpus or base.rollout_num_gpus,
            self.engine,
            layout.tp,
            spread,
            layout.pp,
            layout.cp,
            layout.ep,
        )
        found: dict[str, Any] = dict(zip(KEYS, values, strict=True))
        if self.parts != base.engine_data_parallel_size:
            found["vllm"] = {PARTS: self.parts}
        return found


def own_shape(options: Options) -> RunShape:
    """The shape that the options ask for."""
    layout = TrainerLayout(
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
        options.expert_model_parallel_size,
    )
    return RunShape(
        options.actor_num_nodes,
        options.actor_num_gpus_per_node,
        layout,
        options.engine_gpus,
        options.rollout_num_gpus_per_engine,
        options.engine_data_parallel_size,
        options.colocate,
    )


def node_counts(most: int, own: int) -> list[int]:
    """How many nodes are tried: all small numbers, then powers of two and three times such, and the recipe's own."""
    powers = {factor * 2**power for factor in (1, 3) for power in range(20)}
    return [count for count in range(1, most + 1) if count <= ALL_COUNTS or count in powers or count in (own, most)]


def splits(nodes: int, node: int) -> Iterator[tuple[int, int, int]]:
    """(trainer nodes, ranks on each, GPUs of the engines) where trainer and engines have GPUs of their own: inside one
    node, or each whole nodes."""
    if nodes == 1:
        yield from ((1, ranks, node - ranks) for ranks in range(1, node))
        return
    few = {count for power in range(20) for count in (2**power, nodes - 2**power)}
    yield from (
        (count, node, (nodes - count) * node) for count in range(1, nodes) if nodes <= ALL_COUNTS or count in few
    )


def layouts(fields: Mapping[str, Any], gpus: int, node: int, etp: int | None) -> Iterator[TrainerLayout]:
    """Layouts of `gpus` ranks, from the one that costs least: a pipeline's bubble costs more than ranks of one node
    that share a layer.

    Args:
        fields: `Family.transformer` of config.json.
        node: ranks on a node.
        etp: ranks that share an expert; None: TP.
    """
    heads, groups, layers = (fields[name] for name in ("num_attention_heads", "num_query_groups", "num_layers"))
    experts = fields.get("num_moe_experts") or 1
    found = []
    for tp in divisors(node):
        if heads % tp or (groups % tp and tp % groups):
            continue
        for pp in divisors(gpus // tp if gpus % tp == 0 else 0):
            if layers % pp:
                continue
            for cp in divisors(gpus // (tp * pp)):
                wide = etp or tp
                found += [TrainerLayout(tp, pp, cp, ep) for ep in divisors(experts) if gpus % (wide * ep * pp) == 0]
    return iter(sorted(found, key=lambda one: (one.pp, one.tp * one.cp, one.cp, one.ep)))


def engine_sizes(fields: Mapping[str, Any], gpus: int, node: int, base: Options) -> Iterator[tuple[int, int]]:
    """(GPUs of an engine, parts of its requests): inside a node, or whole nodes, as many engines as `gpus` are then.

    An engine that divides its requests keeps as many GPUs for each part as the recipe gives one.
    """
    heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
    for size in divisors(gpus):
        if (size < node and node % size) or (size > node and size % node):
            continue
        wide = base.engine_tensor_parallel_size if base.engine_data_parallel_size > 1 else size
        if size % wide or heads % wide or (groups % wide and wide % groups):
            continue
        yield size, size // wide


def divisors(number: int) -> list[int]:
    """In ascending order; of 0 none."""
    return [each for each in range(1, number + 1) if number % each == 0]
