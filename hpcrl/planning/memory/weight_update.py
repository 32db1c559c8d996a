"""What a weight update moves, before anything runs: in pieces, the plan of redistribution for the layout that the
options ask for; as whole tensors, the bytes of the model through rank 0.

The trainer's side is what the family's rules and the parallel sizes say, the engines' what vLLM's layers do: columns of
attention and MLP over its tensor-parallel workers, experts over all of them with enable_expert_parallel, key-value
heads repeated where there are more workers than heads, attention once for each of data_parallel_size.

Invariant: the way and the plan are made by the same functions that make them in a run (`hpcrl.weights.update_backend`,
`hpcrl.weights.redistribution.plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.groups import layout as rank_layout
from hpcrl.models.family import Config, Family, Rule, tied
from hpcrl.models.files.config_json import LINEAR
from hpcrl.models.lora.serving import served_as
from hpcrl.models.shared.mtp import is_head
from hpcrl.models.slicing import Shape, Shapes
from hpcrl.plan import Plan
from hpcrl.planning.formulas.parameters import Layout, adapter_parameters, part_shape, stage_layers
from hpcrl.weights.redistribution.layouts import Layouts, Pattern, Worker, held_parts, merged, needed_parts
from hpcrl.weights.redistribution.plan import Redistribution, busiest, redistribute

LINK = 400.0  #: Gb/s of a card where nothing else is said
GB = 1e9
#: seconds for a piece, packed and read, and for a word each way between a rank and a worker in a round: of CPUs, where
#: the second took 0.14 to 0.78 ms
PIECE, WORDS = 80e-6, 0.4e-3
GLOO = "hpcrl_gloo"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
Grid = dict[tuple[int, ...], list[int]]  #: coordinates -> ranks


@dataclass(frozen=True)
class Update:
    """The plan, the value of --weight-transfer, and the rate of a card's link in Gb/s."""

    plan: Redistribution
    transfer: str
    link: float
    instead: WholeUpdate | None = None  #: the other way that could be taken

    @property
    def seconds(self) -> float:
        """What the busiest link needs for its bytes."""
        return busiest(self.plan) * 8 / (self.link * GB)

    @property
    def work(self) -> float:
        """Seconds of the busiest worker for its pieces, and for what it and the ranks tell each other in each round."""
        plan = self.plan
        count = len(plan.destinations)
        memory = plan.carrier() if plan.through_ranks else plan.sender
        told = np.unique((plan.round * plan.ranks + memory) * count + plan.destination) % count
        pieces, words = (np.bincount(where, minlength=count) for where in (plan.destination, told))
        return float((PIECE * pieces + WORDS * words).max(initial=0))


@dataclass(frozen=True)
class WholeUpdate:
    """An update of whole tensors, which rank 0 gathers.

    Attributes:
        transfer: the value of --weight-transfer.
        backend: vLLM's name of the engines' end.
        bytes: of all tensors.
        messages: files, broadcasts, or buffers.
        link: the rate of a card's link in Gb/s.
    """

    transfer: str
    backend: str
    bytes: int
    messages: int
    link: float
    instead: Update | None = None  #: the other way that could be taken

    @property
    def seconds(self) -> float:
        """What a link needs for all bytes once."""
        return self.bytes * 8 / (self.link * GB)


@dataclass(frozen=True)
class AdapterUpdate:
    """An update of an adapter alone: the bytes of its tensors, once."""

    bytes: int


def predict(
    options: Options, family: Family, config: Config, plan: Plan, link: float = LINK
) -> Update | WholeUpdate | AdapterUpdate:
    """The weight update that a run of these options on these hosts makes; of FP8 weights the scales, a part in 4,000,
    are left out.

    Engines of weights in fp32 are taken to be on CPUs, all others on GPUs.

    Raises:
        UsageError: for a --weight-transfer that cannot be there.
    """
    from hpcrl.weights.update_backend import DISK, IPC, NCCL, TAKES_PIECES, VLLM, VLLM_IPC, backend

    if served_as(options, family, config) == "adapter":
        return AdapterUpdate(adapter_parameters(options, family, config) * (2 if options.bf16 else 4))
    end = backend(options, plan, cpu=not options.bf16)
    transfer = "vllm" if end == VLLM_IPC else end.removeprefix("hpcrl_")
    size = _bytes(options, family, config)
    whole = WholeUpdate(transfer, end, size, -(-size // options.update_weight_buffer_size), link)
    if end == DISK:
        return whole
    other = {VLLM: NCCL, VLLM_IPC: IPC, NCCL: VLLM, IPC: VLLM_IPC}.get(end)
    pieces = in_pieces(options, family, config, plan, end if end in TAKES_PIECES else other, link)
    if end not in TAKES_PIECES:
        return replace(whole, instead=pieces)
    return pieces if other is None else replace(pieces, instead=replace(whole, transfer="vllm", backend=other))


def _bytes(options: Options, family: Family, config: Config) -> int:
    """Of all tensors of an update, each once."""
    fields = family.transformer(config)
    held = _Held(options, config, fields)
    names = set[str]()
    total = 0
    for rule in _sent(options, family, config):
        for name, (shape, _) in zip(rule.hf, held.parts_of(rule), strict=True):
            if name not in names:
                total += prod(shape) * _item(options, config, rule, name)
            names.add(name)
    return total


def in_pieces(
    options: Options, family: Family, config: Config, plan: Plan, backend: str = GLOO, link: float = LINK
) -> Update:
    """The plan of an update in pieces.

    Args:
        backend: vLLM's name of the engines' end.
    """
    from hpcrl.weights.pieces.wire import round_bytes
    from hpcrl.weights.update_backend import IPC, SHM, TAKES_PIECES

    fields = family.transformer(config)
    layouts = Layouts()
    rules = list(_sent(options, family, config))
    held = _Held(options, config, fields)
    needed = _Needed(options, fields, len(plan.engines))
    parts: dict[str, list[tuple[Shape, Pattern]]] = {}
    for rule in rules:
        for name, found in zip(rule.hf, held.parts_of(rule), strict=True):
            parts.setdefault(name, []).append(found)
    numbers: dict[int, int] = {}  # id of a pattern that is kept in a cache -> its number

    def number(pattern: Pattern) -> int:
        if id(pattern) not in numbers:
            numbers[id(pattern)] = layouts.pattern(pattern)
        return numbers[id(pattern)]

    for rule in rules:
        for which, name in enumerate(rule.hf):
            if name not in parts:  # of a tied pair, once
                continue
            ((shape, first), *copies) = parts.pop(name)
            if copies:
                mine = layouts.pattern(merged([*first, *(part for _, more in copies for part in more)]))
            else:
                mine = number(first)
            layouts.add(
                name, shape, _item(options, config, rule, name), mine, number(needed.parts_of(rule, which, shape))
            )
    hosts = [place.host for place in plan.trainers]
    through_ranks = backend == IPC
    limit = round_bytes(options.update_weight_buffer_size, hosts, through_ranks)
    workers = _workers(plan, TAKES_PIECES[backend])
    made = redistribute(layouts, workers, hosts, limit, backend == SHM, through_ranks)
    return Update(made, backend.removeprefix("hpcrl_"), link)


def _item(options: Options, config: Config, rule: Rule, name: str) -> int:
    """Bytes of an element as it is sent."""
    if config.get("quantization_config") and LINEAR.search(name):
        return 1
    return 4 if not options.bf16 or rule.megatron.endswith("expert_bias") else 2


def _sent(options: Options, family: Family, config: Config) -> Iterator[Rule]:
    """The rules of an update, with the layers that engines draft with where updates bring them.

    Each tensor comes once: Transformer Engine's names and the local layers' stand for the same one.
    """
    seen = set[tuple[str, ...]]()
    for name, rule in family.tensors(config, (options.mtp_num_layers or 0) if options.refreshes_drafts else 0):
        twin = name == "output_layer.weight"  # of a tied embedding: a copy elsewhere
        if rule.hf not in seen or twin:
            seen.add(rule.hf)
            yield rule


def _workers(plan: Plan, sharing: str) -> list[Worker]:
    from hpcrl.weights.update_backend import destination_host

    found = []
    for number, engine in enumerate(plan.engines):
        places = [place.host for place in (engine, *engine.also) for _ in place.slots]
        found += [Worker(number, destination_host(sharing, number, at, host)) for at, host in enumerate(places)]
    return found


class _Held:
    """Which ranks hold what of a rule."""

    def __init__(self, options: Options, config: Config, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.vocab = config["vocab_size"]
        self.layout = layout = Layout.from_options(options, fields["num_layers"])
        self.stage = {
            number: stage
            for stage in range(layout.pp)
            for number in stage_layers(fields["num_layers"], layout, stage, options.megatron)
        }
        experts = fields.get("num_moe_experts") or 0
        self.each = experts // layout.ep if experts else 0
        self.alone = tied(config) and layout.pp == 1  # the output layer is the embedding itself
        sizes = (options.world_size, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
        groups = rank_layout(*sizes)
        where = {kind: {rank: at for group in found for at, rank in enumerate(group)} for kind, found in groups.items()}
        self.dense = _grid(options.world_size, [where["pp"], where["tp"]])
        # with EP 1 there are no groups of experts' own, and ETP is TP
        every = where.get("ep", dict.fromkeys(range(options.world_size), 0))
        self.sparse = _grid(options.world_size, [where["pp"], every, where.get("etp", where["tp"])])
        self.found: dict[tuple[Any, ...], list[tuple[Shape, Pattern]]] = {}

    def parts_of(self, rule: Rule) -> list[tuple[Shape, Pattern]]:
        """(shape, parts) of each of its tensors; the same object for the same parts."""
        shape = part_shape(rule, self.fields, self.vocab, self.layout.tp, self.layout.etp)
        layer = _LAYER.match(rule.megatron)
        last = rule.megatron.startswith(("output_layer", "decoder.final_layernorm")) or is_head(rule.megatron)
        stage = self.stage[int(layer[1])] if layer else self.layout.pp - 1 if last else 0
        if rule.megatron == "output_layer.weight" and self.alone:
            stage = 0
        home = (stage,) if rule.expert is None else (stage, rule.expert // self.each)
        key = (rule.kind, shape, home)
        if key not in self.found:
            grid, parts = (self.dense, self.layout.tp) if rule.expert is None else (self.sparse, self.layout.etp)
            shapes = Shapes.from_config(self.fields, self.vocab, parts)
            copies = [tuple(grid[(*home, number)]) for number in range(parts)]
            self.found[key] = held_parts(rule.kind, shape, shapes, copies)
        return self.found[key]


def _grid(world: int, axes: Sequence[Mapping[int, int]]) -> Grid:
    found: Grid = {}
    for rank in range(world):
        found.setdefault(tuple(axis[rank] for axis in axes), []).append(rank)
    return found


class _Needed:
    """Which workers need what of a rule; workers of engine i are numbered after those of engine i - 1."""

    def __init__(self, options: Options, fields: Mapping[str, Any], engines: int) -> None:
        told = options.vllm
        self.size = options.rollout_num_gpus_per_engine
        self.engines = engines
        self.tp = int(told.get("tensor_parallel_size") or self.size // int(told.get("data_parallel_size") or 1))
        self.experts = fields.get("num_moe_experts") or 0
        self.groups = fields["num_query_groups"]
        self.spread = bool(told.get("enable_expert_parallel")) and self.experts % self.size == 0
        self.found: dict[tuple[Any, ...], Pattern] = {}

    def parts_of(self, rule: Rule, which: int, shape: Shape) -> Pattern:
        """The parts of its tensor `which`; the same object for the same parts."""
        owner = rule.expert // (self.experts // self.size) if rule.expert is not None and self.spread else None
        repeated = rule.kind in ("qkv", "gated_qkv") and which > 0
        if "eh_proj" in rule.megatron:  # what joins a drafting layer's two inputs is whole on every worker
            rule = replace(rule, kind="same")
        key = (rule.kind, shape, rule.expert is None, owner, repeated)
        if key not in self.found:
            self.found[key] = needed_parts(shape, self._spans(rule, shape, owner, repeated))
        return self.found[key]

    def _spans(
        self, rule: Rule, shape: Shape, owner: int | None, repeated: bool
    ) -> Iterator[tuple[range, list[tuple[int, int]], tuple[int, int] | None]]:
        parts = self.tp if rule.expert is None else self.size
        for local in range(self.size):
            workers = range(local, self.size * self.engines, self.size)  # the same one of each engine
            if owner is not None or rule.kind in ("same", "over_heads"):
                yield workers, [(0, shape[0])] if owner in (None, local) else [], None
                continue
            place = local % parts
            pieces = parts
            if repeated and self.groups < parts:
                place = place * self.groups // parts
                pieces = self.groups
            if rule.kind == "row":
                yield workers, [(0, shape[0])], _part(shape[1], place, pieces)
            elif rule.kind == "fused_gate_up":
                begin, length = _part(shape[0] // 2, place, pieces)
                yield workers, [(begin, length), (shape[0] // 2 + begin, length)], None
            else:
                yield workers, [_part(shape[0], place, pieces)], None


def _part(size: int, place: int, pieces: int) -> tuple[int, int]:
    """(start, length) of one of `pieces` equal parts of `size`; the last may be shorter."""
    each = -(-size // pieces)
    begin = min(size, place * each)
    return begin, min(size, begin + each) - begin


# ---- for people


def update_lines(update: Update | WholeUpdate | AdapterUpdate) -> Iterator[str]:
    """What a card sends and receives, how long that takes, and the memory that it needs."""
    if isinstance(update, AdapterUpdate):
        yield "weights of one update: the adapter alone (docs/models.md)"
        yield f"  {update.bytes / 1e6:.1f} MB to each worker of the engines, the weights under it once, at the start"
        return
    if isinstance(update, WholeUpdate):
        yield "weights of one update: whole tensors, gathered by rank 0 (planned; docs/sizing.md)"
        yield f"  {update.bytes / GB:.1f} GB {WHOLE[update.backend]} (--weight-transfer {update.transfer})"
        if update.transfer == "vllm":
            yield f"  {update.seconds:.2f} s through a link of {update.link:g} Gb/s, in {update.messages} messages"
        if (other := update.instead) is not None:
            yield (
                f"  --weight-transfer {other.transfer} instead: {other.plan.sent().sum() / GB:.1f} GB from all ranks, "
                f"{other.seconds:.2f} s, in {len(other.plan.sender)} pieces"
            )
        return
    plan = update.plan
    sent = plan.sent()
    landed = np.asarray([len(destination.workers) for destination in plan.destinations])
    received = plan.received() / landed
    yield "weights of one update in pieces: from the ranks that hold them to the workers (planned; docs/sizing.md)"
    yield f"  {SENT[update.transfer]} (--weight-transfer {update.transfer})"
    yield f"  a trainer card sends {sent.max() / GB:.2f} GB at most, {sent.mean() / GB:.2f} on average"
    yield f"  a card of an engine receives {received.max() / GB:.2f} GB at most, {received.mean() / GB:.2f} on average"
    stay = plan.sent().sum() - plan.crossing().sum()
    if stay:
        yield f"  {stay / GB:.1f} of {plan.sent().sum() / GB:.1f} GB stay on the host that holds them"
    yield (
        f"  {update.seconds:.2f} s through the busiest card's link of {update.link:g} Gb/s, and {update.work:.1f} s "
        f"for a worker's pieces and messages (by CPUs' times), in {plan.rounds} rounds"
    )
    if update.instead is not None:
        whole = update.instead
        yield (
            f"  --weight-transfer vllm instead: {whole.bytes / GB:.1f} GB from rank 0, {whole.seconds:.2f} s, in "
            f"{whole.messages} messages"
        )
    packed, taken = plan.largest()
    yield (
        f"  extra memory: {2 * packed / 2**30:.2f} GiB on a trainer rank, "
        f"{2 * taken / 2**30:.2f} GiB on a host of engines"
    )


#: --weight-transfer -> how it carries pieces
SENT = {
    "shm": "in memory that ranks and workers of a host share, between hosts through sockets",
    "gloo": "through sockets",
    "nccl": "by NCCL, from GPU to GPU",
    "ipc": "in GPU memory that workers of a host open, between hosts by NCCL from rank to rank",
}
#: the engines' end -> how whole tensors come there
WHOLE = {
    "hpcrl_disk": "are written to files, which every engine reads",
    "hpcrl_vllm": "go by NCCL from trainer rank 0 to every worker",
    "hpcrl_vllm_ipc": "are brought to every trainer rank, in memory that the worker on its GPU opens",
}
