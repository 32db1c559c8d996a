"""Random layouts of both sides of a weight update: a small model of any family on trainer ranks and on engine
workers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from hpcrl.groups import layout as rank_layout
from hpcrl.models.family import Rule, registry
from hpcrl.models.slicing import CUTS, Shapes, SourceRectangle
from hpcrl.planning.formulas.parameters import part_shape
from hpcrl.weights.redistribution.layouts import Layouts, TensorPart, Worker, held_parts, merged, needed_parts
from tests.support.families import ODD, PLAIN, SIZES

ITEM = 4
Span = tuple[list[tuple[int, int]], tuple[int, int] | None]


@dataclass
class Case:
    """A model on both sides: real tensors, what every rank has of every parameter, what every worker wants."""

    hosts: list[str]
    workers: list[Worker]
    layouts: Layouts = field(default_factory=Layouts)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    #: (rank, tensor) -> its part of the parameter as a matrix, where what lies, which of the rule's tensors
    parts: dict[tuple[int, str], tuple[np.ndarray, list[SourceRectangle], int]] = field(default_factory=dict)
    spans: dict[tuple[int, str], Span] = field(default_factory=dict)


def config_of(family: str, odd: bool) -> dict[str, Any]:
    fields = {
        **(ODD if odd else PLAIN),
        "num_hidden_layers": 5,
        **SIZES[family][odd],
        "rms_norm_eps": 1e-6,
        "model_type": family,
    }
    fields.pop("rope_parameters", None)
    if fields.pop("layer_types", None):
        fields["full_attention_interval"] = 2
    tied = fields.pop("tied")
    return fields | {"tie_word_embeddings": tied, "n_shared_experts": fields.get("n_shared_experts", 1)}


def random_case(family: str, chance: Random) -> Case:
    config = config_of(family, chance.random() < 0.5)
    found = registry()[family]
    fields = found.transformer(config)
    experts = fields.get("num_moe_experts") or 0
    heads = fields["num_attention_heads"]
    groups = fields["num_query_groups"]
    widths = [fields["ffn_hidden_size"], heads, fields.get("moe_shared_expert_intermediate_size") or 0]
    if fields.get("linear_attention_freq"):
        widths.append(fields["linear_num_key_heads"])
    tp = chance.choice(
        [n for n in (1, 2, 3, 4) if not any(w % n for w in widths) and (groups % n == 0 or n % groups == 0)]
    )
    ep = chance.choice([n for n in (1, 2, 3, 4) if experts and experts % n == 0] or [1])
    etp = chance.choice([1, 2]) if ep > 1 else tp
    pp, cp = chance.choice([1, 2, 3]), chance.choice([1, 2])
    world = int(np.lcm(tp * pp * cp, etp * ep * pp)) * chance.choice([1, 2])
    groups_of = rank_layout(world, tp, pp, cp, ep, etp)
    where = {kind: {rank: i for g in lists for i, rank in enumerate(g)} for kind, lists in groups_of.items()}
    spread = sorted(chance.randrange(pp) for _ in range(5))  # uneven, even empty, stages; or virtual ones in any order
    if chance.random() < 0.3:
        chance.shuffle(spread)
    case = Case([f"t{rank // chance.choice([1, 2, 4])}" for rank in range(world)], random_workers(chance))
    stage_of = {rank: where["pp"][rank] for rank in range(world)}
    held: dict[str, tuple[tuple[int, ...], list[TensorPart]]] = {}
    kinds: dict[str, tuple[Rule, int]] = {}
    seen: set[tuple[str, ...]] = set()
    for name, rule in found.tensors(config):
        if rule.hf in seen and name != "output_layer.weight":
            continue
        seen.add(rule.hf)
        last = name.startswith(("output_layer", "decoder.final"))
        stage = spread[int(name.split(".")[2])] if ".layers." in name else pp - 1 if last else 0
        shape = part_shape(rule, fields, config["vocab_size"], tp, etp)
        parts = tp if rule.expert is None else etp
        shapes = Shapes.from_config(fields, config["vocab_size"], parts)
        copies: list[list[int]] = [[] for _ in range(parts)]
        for rank in range(world):
            if stage_of[rank] != stage:
                continue
            if rule.expert is None or ep == 1:
                copies[where["tp"][rank]].append(rank)
            elif where["ep"][rank] == rule.expert // (experts // ep):
                copies[where["etp"][rank]].append(rank)
        for hf, (full, some) in zip(
            rule.hf, held_parts(rule.kind, shape, shapes, [tuple(c) for c in copies]), strict=True
        ):
            held.setdefault(hf, (full, []))[1].extend(some)
            kinds.setdefault(hf, (rule, rule.hf.index(hf)))
            case.tensors.setdefault(hf, numbers(full, len(case.tensors)))
        wholes = [torch.from_numpy(case.tensors[hf].reshape(held[hf][0])) for hf in rule.hf]
        for part, ranks in enumerate(copies):
            own = CUTS[rule.kind].part(wholes, part, shape, shapes).numpy()
            places = CUTS[rule.kind].places(part, shape, shapes)
            for rank, (which, hf) in itertools.product(ranks, enumerate(rule.hf)):
                case.parts.setdefault((rank, hf), (own.reshape(own.shape[0], -1), places, which))
    for hf, (full, some) in held.items():
        rule, which = kinds[hf]
        spans = [wants(chance, case, rule, which, full, fields, worker) for worker in range(len(case.workers))]
        for worker, span in enumerate(spans):
            case.spans[worker, hf] = span
        needed = needed_parts(full, [((worker,), *span) for worker, span in enumerate(spans)])
        case.layouts.add(hf, full, ITEM, case.layouts.pattern(merged(some)), case.layouts.pattern(needed))
    return case


def numbers(shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Every element of every tensor is another number."""
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.int32) + salt * 1_000_003).reshape(shape[0], -1)


def random_workers(chance: Random) -> list[Worker]:
    """Engines of 1 to 8 workers, several to a host or one over several hosts, now and then on hosts with ranks."""
    size = chance.choice([1, 2, 3, 4, 8])
    engines = chance.choice([1, 1, 2, 3])
    each = chance.choice([1, 2, 8])
    prefix = chance.choice(["e", "e", "e", "t"])
    return [Worker(n // size, f"{prefix}{n // each}") for n in range(size * engines)]


def wants(
    chance: Random, case: Case, rule: Rule, which: int, full: tuple[int, ...], fields: dict[str, Any], worker: int
) -> Span:
    """As vLLM cuts it: fused halves, heads repeated, experts of other workers not at all; sizes need not divide."""
    engine = case.workers[worker].engine
    peers = [n for n, other in enumerate(case.workers) if other.engine == engine]
    place, size = peers.index(worker), len(peers)

    def cut(total: int, at: int, of: int) -> tuple[int, int]:
        each = -(-total // of)
        return min(total, at * each), max(0, min(total, (at + 1) * each) - at * each)

    if rule.kind == "same":
        return [(0, full[0])], None
    if rule.expert is not None and engine % 2:  # every second engine with expert parallelism
        return ([(0, full[0])] if rule.expert % size == place else [(0, 0)]), None
    if rule.kind == "row":
        return [(0, full[0])], cut(full[1], place, size)
    if rule.kind == "fused_gate_up":
        begin, length = cut(full[0] // 2, place, size)
        return [(begin, length), (full[0] // 2 + begin, length)], None
    if rule.kind == "qkv" and which:
        few = min(size, fields["num_query_groups"])
        return [cut(full[0], place * few // size, few)], None
    return [cut(full[0], place, size)], None
