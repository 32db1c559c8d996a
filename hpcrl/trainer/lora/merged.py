"""Weights with their adapter added in: W + scale B A, each rank's part of it by itself.

A rank holds its rows of B and all of A, or all of B and its columns of A: what it holds of W it can merge alone.

Invariant: the sum is in fp32 and rounded once, to the dtype of the weights, so that it is the same on every way
to an engine or a file; between layouts products of A and B may differ by their own rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from hpcrl.trainer.lora.layer import SUFFIX, Adapter, GroupedAdapter, adapters_of

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy


def sent_values(policy: Policy) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes the values of `policy.part` of its parameters; None: they are those."""
    if policy.part == "merged":
        return MergedWeights(policy.modules).value
    if policy.part == "sent":
        return ScaledAdapters(policy.modules).value
    return None


class ScaledAdapters:
    """Adapters as engines multiply with them: with the scale in B."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._adapters = {id(a.lora_B): a for module in modules for _, a in adapters_of(module)}

    @torch.no_grad()
    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter; of a B times the scale, rounded once."""
        if (adapter := self._adapters.get(id(parameter))) is None:
            return parameter.detach()
        return (parameter.float() * adapter.scale).to(parameter.dtype)


class MergedWeights:
    """Which adapter goes with which parameter of these models."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._adapters: dict[int, Adapter] = {}
        for module in modules:
            found = dict(module.named_modules())
            for name, adapter in found.items():
                if isinstance(adapter, GroupedAdapter):
                    layer = found[name.removesuffix(SUFFIX)]
                    for number, one in enumerate(adapter):
                        self._adapters[id(getattr(layer, f"weight{number}"))] = one
                elif isinstance(adapter, Adapter) and name.endswith(SUFFIX):
                    self._adapters[id(found[name.removesuffix(SUFFIX)].weight)] = adapter

    @torch.no_grad()
    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter with its adapter added in, new; the parameter itself where it has none."""
        adapter = self._adapters.get(id(parameter))
        if adapter is None:
            return parameter.detach()
        return (parameter.float() + adapter.delta()).to(parameter.dtype)
