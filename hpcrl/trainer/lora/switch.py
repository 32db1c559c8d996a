"""The model without its adapters, for a while: it then is the base that it was before training.

    reference = BaseAsReference(policy)
    with reference.swapped_in():
        ...                                  # as `HostWeights.swapped_in`, with no second set of weights

Invariants: adapters are on again afterwards, whatever happened inside; a pass without gradients leaves out no inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hpcrl.trainer.lora.layer import adapters_of

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy


@contextmanager
def adapters_off(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, the layers of these models give what they give without adapters."""
    found = [adapter for module in modules for _, adapter in adapters_of(module)]
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


@contextmanager
def dropping(modules: Iterable[torch.nn.Module], wanted: bool) -> Iterator[None]:
    """Inside, adapters leave out some of their inputs (--lora-dropout), or none."""
    found = [adapter for module in modules for _, adapter in adapters_of(module)]
    for adapter in found:
        adapter.train(wanted)
    try:
        yield
    finally:
        for adapter in found:
            adapter.train(False)


class BaseAsReference:
    """The reference of a run with adapters that began with the base: its policy with the adapters off."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the policy's modules are the base; for forward passes alone."""
        with adapters_off(self._policy.modules):
            yield
