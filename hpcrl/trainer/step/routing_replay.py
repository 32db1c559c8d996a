"""Whose experts a pass trains with: those that its own routers choose, or those that were chosen before for the same
tokens, by the engine that sampled them (R3) or by the old policy's pass (R2).

Megatron's router asks the object in its place `router_replay` for the choice.  Megatron's own object for it holds one
micro-batch at a time, for all routers of the process, and must be told whether a call is a recomputation; ours counts:
its schedules give every chunk of layers the micro-batches in order, forward as well as backward, and what a checkpoint
will compute again runs without gradients the first time and with them the second.

Invariants: only the choice is replayed: how much each expert counts, and the gradient of that, is the router's own in
every pass; a recomputation has the choice of its forward pass; a choice for other rows than the router sees, or a pass
in which a router was not asked exactly once for each micro-batch, is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.models.routing import Routing
from hpcrl.trainer.megatron.model import Policy
from hpcrl.transport.share_format import SampleBatch
from hpcrl.utils.device_copies import to_device

COLUMN = "rollout_routed_experts"  #: of `SampleBatch.extra`
How = Literal["own", "record", "replay"]


class Choices(Protocol):
    """The experts of one micro-batch, for the rows that this rank's routers see.

    A layer is named by its place among those with experts.  A row whose experts are all the same is one of which
    nothing is known, padding for instance.
    """

    def table(self, layers: Sequence[int]) -> torch.Tensor:
        """Integers [layers, rows, experts a token], on the host."""


@dataclass(frozen=True)
class GivenChoices:
    """Those that came with the samples.

    Nothing is copied before a pass asks for it.

    Attributes:
        experts: uint8 or uint16 [tokens of the share, layers, experts a token].
        source: int64 [rows], which of these tokens each row is, -1: none.
    """

    experts: np.ndarray
    source: np.ndarray

    def table(self, layers: Sequence[int]) -> torch.Tensor:
        narrow = np.uint8 if self.experts.dtype == np.uint8 else np.int32  # torch indexes by no uint16
        found = np.zeros((len(layers), len(self.source), self.experts.shape[2]), narrow)
        known = self.source >= 0
        found[:, known] = self.experts[self.source[known]][:, layers].swapaxes(0, 1)
        return torch.from_numpy(found)


@dataclass
class RecordedChoices:
    """Those that a pass has made.

    They are on the device until all of this rank's layers have chosen, and go to the host in one copy, which nothing
    waits for: what reads it is a copy back, in the same stream.

    Attributes:
        dtype: the narrowest that holds them.
        expected: layers of this rank with experts, in their order.
    """

    dtype: torch.dtype
    expected: Sequence[int]
    _of_layers: dict[int, torch.Tensor] = field(default_factory=dict)
    _table: torch.Tensor | None = None

    def table(self, layers: Sequence[int]) -> torch.Tensor:
        assert self._table is not None and list(layers) == list(self.expected), "the pass is over"
        return self._table

    def put(self, layer: int, experts: torch.Tensor) -> None:
        self._of_layers[layer] = experts.to(self.dtype)
        if len(self._of_layers) == len(self.expected):
            whole = torch.stack([self._of_layers[layer] for layer in self.expected])
            self._table = whole.to("cpu", non_blocking=True)
            self._of_layers.clear()


@dataclass
class Difference:
    """Over layers and rows with a given choice: how many there were, and of how many the router would have chosen
    otherwise."""

    sums: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Difference:
        return cls(torch.zeros(2, dtype=torch.float64, device=device))

    def add(self, own: torch.Tensor, given: torch.Tensor, known: torch.Tensor) -> None:
        changed = (own.sort(1).values != given.sort(1).values).any(1) & known
        self.sums += torch.stack([known.sum(), changed.sum()])

    def share(self) -> float:
        """Over all ranks; collective."""
        dist.all_reduce(self.sums)
        rows, changed = self.sums.tolist()
        return changed / max(rows, 1.0)


Given = Callable[[int], torch.Tensor]  #: number of a micro-batch -> a layer's experts, integers [rows, experts a token]


class Chooser:
    """The replay object of one router, for one pass.

    Attributes:
        layer: which of those with experts.
        given: the choice to be taken; None: what the router chooses is recorded.
        difference: where to count what the replay changes, in the pass that is trained.
    """

    def __init__(self, layer: int, batches: Sequence[Any], given: Given | None, difference: Difference | None) -> None:
        self.layer = layer
        self._batches = batches
        self._given = given
        self._difference = difference
        self.calls: Counter[bool] = Counter()  # without and with gradients
        self.layer_number: int | None = None  # written by Megatron, from 0.17

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores [rows, topk] of the experts that are taken, and which these are, int64), as Megatron's
        RouterReplay."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        number = self._next()
        if self._given is None:
            self._batches[number].choices.put(self.layer, own)
            return values, own
        given = self._given(number)
        if given.shape != own.shape:
            raise HpcrlError(
                f"routing replay: experts of {list(given.shape)} for a router that chooses {list(own.shape)}"
            )
        given = given.long()
        known = given[:, 0] != given[:, 1]
        if self._difference is not None and torch.is_grad_enabled():
            self._difference.add(own, given, known)
        taken = torch.where(known[:, None], given, own)
        return scores.gather(1, taken), taken

    def _next(self) -> int:
        """The number of the micro-batch that this call is for."""
        number = self.calls[torch.is_grad_enabled()]
        self.calls[torch.is_grad_enabled()] += 1
        most = len(self._batches)
        if number >= most:
            raise HpcrlError(f"routing replay: a router was asked for more than the {most} micro-batches")
        return number


def routing_of(policy: Policy) -> Routing:
    """Of a model that has experts, as `check_routing` makes sure."""
    found = Routing.of_fields(vars(policy.config))
    assert found is not None
    return found


def given_experts(policy: Policy, batch: SampleBatch) -> np.ndarray:
    """The engine's choice [tokens, layers, experts a token].

    Raises:
        DataError: unless the batch has it, and it fits the model.
    """
    if COLUMN not in batch.extra:
        raise DataError(
            "the samples do not say which experts the engine chose", "leave --use-rollout-routing-replay out"
        )
    return routing_of(policy).read(batch.extra[COLUMN])


@contextmanager
def routed(
    policy: Policy, batches: Sequence[Any], how: How, training: bool, difference: Difference | None = None
) -> Iterator[None]:
    """Within, one pass over the micro-batches takes the experts of `batch.choices`, or records them there.

    Args:
        batches: with an attribute `choices`.
        training: with a backward pass.

    Raises:
        HpcrlError: where Megatron asked otherwise than once for each.
    """
    if how == "own":
        yield
        return
    routing = routing_of(policy)
    routers = {routing.layers.index(router.layer_number - 1): router for router in _routers(policy)}
    if how == "record":
        for batch in batches:
            batch.choices = RecordedChoices(torch.uint8 if routing.dtype.itemsize == 1 else torch.int32, list(routers))

    def copied(number: int) -> torch.Tensor:
        return to_device(batches[number].choices.table(list(routers)), policy.ranks.device)

    table = lru_cache(maxsize=4)(copied)  # once for all layers; again for a recomputation that comes much later
    choosers = []
    for place, (layer, router) in enumerate(routers.items()):
        given = None if how == "record" else lambda number, place=place: table(number)[place]
        chooser = Chooser(layer, batches, given, difference)
        choosers.append((router, chooser))
        router.router_replay = chooser
    try:
        yield
    finally:
        for router, _ in choosers:
            router.router_replay = None
    for _, chooser in choosers:
        if chooser.calls[training] != len(batches) or chooser.calls[True] > training * len(batches):
            raise HpcrlError(
                f"routing replay: router {chooser.layer} was asked {dict(chooser.calls)} of {len(batches)} "
                "micro-batches"
            )


def _routers(policy: Policy) -> Iterator[Any]:
    """Every router of this rank's layers.

    Raises:
        UsageError: if Megatron's have no place for a replay.
    """
    for module in policy.modules:
        for layer in module.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            if not hasattr(router, "router_replay"):
                raise UsageError(
                    "routing replay: the routers of the installed Megatron-core cannot replay",
                    "install 0.16.1 or later",
                )
            yield router
