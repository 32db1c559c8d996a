"""How many bytes of the fake device are alive at once, by phase, and what of host memory is pinned.

    with FakeDevice() as device, DeviceBytes() as live:
        with live.phase("forward and backward"):
            ...
    live.peaks["forward and backward"]           # most bytes at once, of everything that was there
    live.now

Storages count once, whatever views there are of them; those of parameters that are replaced by hand count too, since
every tensor of the device comes from an operation that this mode sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.support.fake_device import frames


def _selected() -> int:
    """How many rows Megatron's dispatcher of tokens takes, which only the device knows."""
    for frame in frames():
        if frame.f_code.co_name == "permute":
            return frame.f_locals["num_out_tokens"]
    raise RuntimeError("only the device knows how many are selected")


class DeviceBytes(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        now: bytes that are alive on the device.
        peaks: of each phase the most of them at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peaks: dict[str, int] = {}
        self._phase = "start"
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs)))
        if fake and func.namespace == "c10d" and len(func._schema.returns) == 1:
            return FakeWork().boxed()  # of these operations torch knows no shapes
        if fake and func is torch.ops.aten.masked_select.default:
            found = args[0].new_empty(_selected())
        else:
            found = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, found)):
            if isinstance(value, FakeTensor):
                self._count(value.untyped_storage())
        return found

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as that phase."""
        before, self._phase = self._phase, name
        self.peaks[name] = max(self.peaks.get(name, 0), self.now)
        try:
            yield
        finally:
            self._phase = before

    def _count(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        known = self._sizes.get(key)
        if known == size:
            return
        if known is None:
            weakref.finalize(memory, self._gone, key)
        self._sizes[key] = size
        self.now += size - (known or 0)
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
