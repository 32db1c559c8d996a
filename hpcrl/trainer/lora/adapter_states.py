"""Several adapters in the place of one: their parameters, optimizer states and random numbers change places.

    states = AdapterStates(policy)
    first = states.add(options_of_the_first)      # a policy with its schedule; its values are still to be read or drawn
    states.enter(0)                               # from here on the model has, and the optimizer steps, the first

Invariants: there is one model, one set of gradients and one optimizer, whichever adapter they are of at a time; what an
adapter has left is there again, bit for bit, when it comes back; all adapters have the same shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.adapters.settings import LoraSettings, lora_settings
from hpcrl.config.options import Options
from hpcrl.trainer.checkpoint.contents import random_state, restore_rng
from hpcrl.trainer.lora.layer import Adapter, adapters_of
from hpcrl.trainer.megatron.model import make_scheduler
from hpcrl.trainer.parallel_state import seed_rank

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

#: of one inner optimizer: parameter -> moments; and what its groups say besides their parameters
Moments = Mapping[Any, Any]
GroupFacts = list[dict[str, Any]]


@dataclass
class _State:
    """What one adapter has while another is in the model.

    Attributes:
        values: of its parameters, in the model's order.
        masters: of what the optimizers step on, which may be copies in full precision, or parts, of the parameters.
        moments, groups: of each inner optimizer.
        random: as `contents.random_state`.
    """

    settings: LoraSettings
    values: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    moments: list[Moments] = field(default_factory=list)
    groups: list[GroupFacts] = field(default_factory=list)
    random: dict[str, Any] = field(default_factory=dict)


class AdapterStates:
    """Of one rank.

    Attributes:
        policy: whose parameters, as they are now, are those of every adapter that is added.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._adapters = [adapter for module in policy.modules for _, adapter in adapters_of(module)]
        self._parameters = [parameter for adapter in self._adapters for parameter in adapter.parameters()]
        leaves = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
        self._inner: list[Any] = [leaf.optimizer for leaf in leaves if getattr(leaf, "optimizer", None) is not None]
        assert policy.lora is not None
        self._fresh = _State(policy.lora)
        self._keep(self._fresh)
        self._states: list[_State] = []
        self._now: int | None = None

    def add(self, options: Options) -> Policy:
        """One more adapter, which is in the model from here on: the policy with its settings and schedule."""
        settings = lora_settings(options)
        assert settings is not None
        self._leave()
        self._put(replace(self._fresh, settings=settings, moments=[defaultdict(dict) for _ in self._inner]))
        for inner in self._inner:
            for group in inner.param_groups:  # Megatron's schedule goes by these before its own
                group["max_lr"] = options.lr
                group["min_lr"] = options.min_lr
        seed_rank(options.seed, self._policy.ranks)
        self._states.append(_State(settings))
        self._now = len(self._states) - 1
        return replace(self._policy, scheduler=make_scheduler(self._policy.optimizer, options), lora=settings)

    def enter(self, slot: int) -> None:
        """Have this adapter in the model and the optimizer."""
        if slot != self._now:
            self._leave()
            self._put(self._states[slot])
            self._now = slot

    @contextmanager
    def shown(self, slot: int) -> Iterator[None]:
        """Inside, the model's parameters have this adapter's values, to be exported."""
        if slot == self._now or self._now is None:
            yield
            return
        now = self._states[self._now]
        now.values = _copies(self._parameters, now.values)
        try:
            self._show(self._states[slot])
            yield
        finally:
            self._show(now)

    def _leave(self) -> None:
        if self._now is not None:
            self._keep(self._states[self._now])

    def _keep(self, state: _State) -> None:
        state.values = _copies(self._parameters, state.values)
        state.masters = _copies(self._masters(), state.masters)
        state.moments = [inner.state for inner in self._inner]
        state.groups = [[_facts(group) for group in inner.param_groups] for inner in self._inner]
        state.random = random_state()

    def _put(self, state: _State) -> None:
        self._show(state)
        _fill(self._masters(), state.masters)
        for inner, moments, facts in zip(self._inner, state.moments, state.groups, strict=True):
            inner.state = moments
            for group, known in zip(inner.param_groups, facts, strict=True):
                for name in group.keys() - known.keys() - {"params"}:
                    del group[name]
                group.update(known)
        restore_rng(state.random)

    def _show(self, state: _State) -> None:
        _fill(self._parameters, state.values)
        for adapter in self._adapters:
            _set_numbers(adapter, state.settings)

    def _masters(self) -> Iterator[torch.Tensor]:
        for inner in self._inner:
            for group in inner.param_groups:
                yield from group["params"]


def _facts(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says besides its parameters; a count of steps may be a tensor that grows."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _set_numbers(adapter: Adapter, settings: LoraSettings) -> None:
    adapter.scale = settings.scale
    adapter.dropout = settings.dropout


@torch.no_grad()
def _copies(tensors: Iterable[torch.Tensor], into: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors, in the memory of earlier ones if there are any."""
    found = [*tensors]
    if not into:
        return [tensor.detach().clone() for tensor in found]
    _fill(into, found)
    return into


@torch.no_grad()
def _fill(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)
