"""How many bytes of tensors a computation has alive at once, counted on the CPU.

with LiveBytes() as live:
    ...
live.peak
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """now, peak: bytes of all storages that operations inside have made and that are still there; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage(value) for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for value in tree_iter(found):
            if isinstance(value, torch.Tensor) and storage(value) not in before:
                self._count(value.untyped_storage())
        return found

    def _count(self, memory: torch.UntypedStorage) -> None:
        key = memory._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += (size := memory.nbytes())
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def storage(value: torch.Tensor) -> int:
    """What tells one storage from another."""
    return value.untyped_storage()._cdata
