"""Which shapes hold a run: each is checked as `hpcrl plan` checks a recipe, and its memory is estimated.

    found = Search(recipe, flags, site, target, fields).shapes(8)
    found.fitting, found.nearest

Invariants: a pure function of recipe, flags, site and config.json; a candidate that is returned passes every check that
`hpcrl plan` makes; what a flag sets is in every shape as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, resolve_stages
from hpcrl.errors import UsageError
from hpcrl.fit.shapes import (
    KEYS,
    PARTS,
    RunShape,
    TrainerLayout,
    engine_sizes,
    layouts,
    node_counts,
    own_shape,
    splits,
)
from hpcrl.groups import planned
from hpcrl.launch.allocation_request import make_request
from hpcrl.launch.preflight import refuse_settings
from hpcrl.launch.scheduler import AllocationRequest
from hpcrl.launch.site import SiteProfile
from hpcrl.memory.activations import weight_bytes
from hpcrl.memory.engine import engine_terms
from hpcrl.memory.host_fits import host_misfit
from hpcrl.memory.parameters import whole_model
from hpcrl.memory.report import ASLEEP, turns, warnings
from hpcrl.memory.training import GIB, MemoryTerms, fullest_rank, gradient_bytes
from hpcrl.models.family import Config, Family
from hpcrl.speed.estimate import Estimate, estimate

PLACES = {"run": "{run}", "prepared": "{run}/prepared"}


@dataclass(frozen=True)
class FitTarget:
    """What runs, and on what.

    Attributes:
        card: name of the GPU in `hpcrl.speed.cards`; memory: its GiB.
        node: GPUs of a node.
        host: GiB of a host, None if that is not known.
        response: tokens of a response in the mean; None: a share of the longest.
        link: Gb/s of a card's network link, None for the usual.
    """

    family: Family
    config: Config
    card: str
    memory: float
    node: int
    host: float | None = None
    response: int | None = None
    link: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A shape that holds the run, by all that is known without trying it.

    Attributes:
        settings: the options that make the recipe of this shape, tables as flags have them.
        memory: GiB of a GPU at the peak.
        phase: in which that is.
    """

    shape: RunShape
    settings: dict[str, Any]
    options: Options
    request: AllocationRequest
    speed: Estimate
    memory: float
    phase: str

    @property
    def nodes(self) -> int:
        """All nodes of the job."""
        return sum(component.nodes for component in self.request.components)


@dataclass(frozen=True)
class NearMiss:
    """A shape that does not hold the run.

    Attributes:
        over: by how much, as a share of the card; inf where that has no measure.
        why: in words; hint: what to do.
        options: of one whose trainer is too large.
    """

    shape: RunShape
    over: float
    why: str
    hint: str = ""
    options: Options | None = None


@dataclass
class FoundShapes:
    """What a search has found.

    Attributes:
        fitting: candidates.
        missed: those that came nearest, one for each way of asking.
    """

    fitting: list[Candidate] = field(default_factory=list)
    missed: list[NearMiss] = field(default_factory=list)

    @property
    def nearest(self) -> NearMiss | None:
        return min(self.missed, key=lambda miss: miss.over, default=None)


class Search:
    """Shapes of one recipe on one site."""

    def __init__(self, recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile, target: FitTarget) -> None:
        self._recipe, self._flags, self._site, self._target = recipe, dict(flags), site, target
        self.base = base_options(recipe, flags, site)
        self._fields = target.family.transformer(target.config)
        self._layouts: dict[tuple[int, int, bool], TrainerLayout | None] = {}
        self._engines: dict[int, list[tuple[int, int]]] = {}

    def shapes(self, most: int) -> FoundShapes:
        """The fastest of each number of nodes, with shared GPUs and without, and the recipe's own shape."""
        found = FoundShapes()
        own = own_shape(self.base)
        for count in node_counts(most, own.trainers):
            for shared in (True, False):
                self._best(found, self._with_nodes(count, shared))
        if own not in [one.shape for one in found.fitting] and self._nodes(own) <= most:
            self._best(found, [own])
        return found

    def _nodes(self, shape: RunShape) -> int:
        """Nodes that a shape needs at least."""
        gpus = shape.ranks + (0 if shape.shared else shape.engine_gpus)
        return max(shape.trainers, -(-gpus // self._target.node))

    def _best(self, found: FoundShapes, shapes: Iterator[RunShape] | list[RunShape]) -> None:
        """Add the fastest of these that holds the run, or else the one that comes nearest."""
        made = [self.judge(shape) for shape in shapes if self._pinned(shape)]
        whole = [one for one in made if isinstance(one, Candidate)]
        if whole:
            found.fitting.append(min(whole, key=self._preferred))
            return
        missed = [one for one in made if isinstance(one, NearMiss)]
        found.missed += sorted(missed, key=lambda miss: miss.over)[:1]

    def _preferred(self, one: Candidate) -> tuple[float, int, int]:
        """The shortest step; of those within a few hundredths, what changes least of the recipe."""
        told = one.shape.settings(self.base)
        changed = sum(told[key] != getattr(self.base, key) for key in KEYS)
        return round(one.speed.step(0.0), -1 if one.speed.step(0.0) > 200 else 0), changed, one.shape.engine

    def _pinned(self, shape: RunShape) -> bool:
        """Whether the shape is what the flags say."""
        told = shape.settings(self.base)
        parts = (self._flags.get("vllm") or {}).get(PARTS)
        return all(told[key] == self._flags[key] for key in KEYS if key in self._flags) and parts in (None, shape.parts)

    # ---- what is tried

    def _with_nodes(self, count: int, shared: bool) -> Iterator[RunShape]:
        node = self._target.node
        if not self.base.num_engines:
            if not shared:
                yield from self._of(count, node, 0, False)
            return
        if shared:
            yield from self._of(count, node, count * node, True)
            return
        for trainers, each, gpus in splits(count, node):
            yield from self._of(trainers, each, gpus, False)

    def _of(self, trainers: int, each: int, engine_gpus: int, shared: bool) -> Iterator[RunShape]:
        """The trainer's own layout and the first that fits, each with every size of an engine."""
        own = own_shape(self.base)
        chosen = dict.fromkeys(layout for layout in (own.layout, self._first(trainers, each, shared)) if layout)
        sizes = self._sizes(engine_gpus) if engine_gpus else [(own.engine, own.parts)]
        for layout in chosen:
            for engine, parts in sizes:
                yield RunShape(trainers, each, layout, engine_gpus, engine, parts, shared)

    def _sizes(self, gpus: int) -> list[tuple[int, int]]:
        if gpus not in self._engines:
            self._engines[gpus] = list(engine_sizes(self._fields, gpus, self._target.node, self.base))
        return self._engines[gpus]

    def _first(self, trainers: int, each: int, shared: bool) -> TrainerLayout | None:
        """The first layout of so many ranks whose memory fits, with sleeping engines where GPUs are shared, or that
        comes nearest."""
        key = trainers, each, shared
        if key not in self._layouts:
            room = self._target.memory * GIB - (ASLEEP if shared else 0)
            self._layouts[key] = self._find_first(trainers, each, room)
        return self._layouts[key]

    def _laid_out(self, layout: TrainerLayout) -> bool:
        """Whether the layout is what the flags say."""
        told = RunShape(1, 1, layout, 0, 1, 1, False).settings(self.base)
        return all(told[key] == self._flags[key] for key in KEYS[5:] if key in self._flags)

    def _find_first(self, trainers: int, each: int, room: float) -> TrainerLayout | None:
        ranks = trainers * each
        least: tuple[float, TrainerLayout] | None = None
        for layout in layouts(self._fields, ranks, each, self.base.expert_tensor_parallel_size):
            if not self._laid_out(layout):
                continue
            options = self._cut(trainers, each, layout)
            if options.step_batch_size % options.data_parallel_size:
                continue
            size = self._least(options) or fullest_rank(options, self._target.family, self._target.config).total
            if size <= room:
                return layout
            if least is None or size < least[0]:
                least = size, layout
        return least[1] if least else None

    def _cut(self, trainers: int, each: int, layout: TrainerLayout) -> Options:
        """The options, not checked, of a trainer of this layout."""
        told = RunShape(trainers, each, layout, 0, 1, 1, False).settings(self.base)
        kept = ("colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine", "vllm")
        return self.base.model_copy(update={key: value for key, value in told.items() if key not in kept})

    @cached_property
    def _parameters(self) -> tuple[int, int]:
        count = whole_model(self._target.family, self._target.config)
        return count.dense, count.expert

    def _least(self, options: Options) -> float:
        """Bytes of weights and gradients of a mean rank where they alone are more than the GPU has, else 0: what need
        not be counted in full."""
        dense, expert = self._parameters
        pp = options.pipeline_model_parallel_size
        held = dense / (options.tensor_model_parallel_size * pp)
        held += expert / (options.expert_model_parallel_size * options.expert_tensor_size * pp)
        size = held * (weight_bytes(options) + gradient_bytes(options))
        return size if size > self._target.memory * GIB else 0.0

    # ---- what holds

    def _resolve(self, settings: Mapping[str, Any]) -> Options:
        """The options of the recipe with these; UsageError for what cannot be."""
        flags = self._site.options(self._recipe, {**self._flags, **_with_tables(self._flags, settings)})
        return resolve_stages(self._recipe, flags, PLACES)[0]

    def judge(self, shape: RunShape) -> Candidate | NearMiss:
        """Whether a shape passes every check and its memory fits."""
        target = self._target
        settings = shape.settings(self.base)
        try:
            options = self._resolve(settings)
            request = make_request([options], self._site)
            refuse_settings([options], lambda _: request.hosts(), packages=False)
        except UsageError as error:
            return NearMiss(shape, float("inf"), error.what, error.hint)
        terms = fullest_rank(options, target.family, target.config)
        if terms.total > target.memory * GIB:
            return self._too_large(shape, options, terms)
        memory, phase = terms.total / GIB, terms.fullest
        if options.num_engines:
            engine = engine_terms(options, target.family, target.config, target.memory * GIB)
            if lacks := list(warnings(options, terms, engine, target.memory)):
                short = max(0.0, -engine.gpu["KV cache"] / GIB)
                return NearMiss(shape, short / target.memory, lacks[0].removeprefix("warn: "))
            if options.takes_turns:
                taken = turns(options, terms, engine)
                phase = max(taken, key=lambda name: taken[name])
                memory = taken[phase] / GIB
        lacking = target.host and host_misfit(options, target.family, target.config, target.memory, target.host)
        if lacking:
            return NearMiss(shape, 1.0, lacking.what, f"give {lacking.change}" if lacking.change else "")
        speed = estimate(options, target.family, target.config, target.card, target.memory, target.response)
        return Candidate(shape, settings, options, request, speed, memory, phase)

    def _too_large(self, shape: RunShape, options: Options, terms: MemoryTerms) -> NearMiss:
        gpu, taken = self._target.memory, terms.total / GIB
        rank = planned(options)["pp"][0][terms.stage]
        why = f"rank {rank} takes {taken:.1f} GiB in {terms.fullest}, of {gpu:g} a GPU: {taken - gpu:.1f} are missing"
        return NearMiss(shape, taken / gpu - 1, why, options=options)


def _with_tables(flags: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, vLLM's in addition to those of the flags."""
    if "vllm" not in settings:
        return dict(settings)
    return {**settings, "vllm": {**flags.get("vllm", {}), **settings["vllm"]}}


def base_options(recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile) -> Options:
    """The recipe's own options: with the flags, or, where those of a shape do not go with the rest of it, without
    these.

    Raises:
        UsageError: for options that cannot be.
    """
    try:
        return resolve_stages(recipe, site.options(recipe, flags), PLACES)[0]
    except UsageError:
        if not flags.keys() & {*KEYS}:
            raise
        rest = {name: value for name, value in flags.items() if name not in KEYS}
        try:
            return resolve_stages(recipe, site.options(recipe, rest), PLACES)[0]
        except UsageError:
            pass
        raise
