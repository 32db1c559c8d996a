"""How many bytes of the fake device are alive at once, by phase, and how many of large tensors in host memory.

    with FakeDevice() as device, DeviceBytes(device) as live:
        with live.phase("forward and backward"):
            ...
    live.peaks["forward and backward"]           # most bytes at once, of everything that was there
    live.now

Storages count once, whatever views there are of them; those of parameters that are replaced by hand count too, since
every tensor of the device comes from an operation that its mode sees and hands to `count_operation`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Counted(Protocol):
    """The device whose bytes are counted."""

    live: DeviceBytes | None


class DeviceBytes:
    """Counts while it is entered.

    Attributes:
        now: bytes that are alive on the device.
        peaks: of each phase the most of them at once.
        host, host_peak: the same of host memory that has no content, in all phases.
    """

    def __init__(self, device: Counted) -> None:
        self._device = device
        self.now = 0
        self.peaks: dict[str, int] = {}
        self.host = self.host_peak = 0
        self._phase = "start"
        self._sizes: dict[int, tuple[int, bool]] = {}  # storage -> bytes, and whether it is the host's

    def __enter__(self) -> DeviceBytes:
        self._device.live = self
        return self

    def __exit__(self, *error: Any) -> None:
        self._device.live = None

    def count_operation(self, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
        """Count what an operation took and gave."""
        self._count_values(args)
        if kwargs:
            self._count_values(kwargs.values())
        self._count_values((found,))

    def _count_values(self, values: Any) -> None:
        for value in values:
            if type(value) is FakeTensor:
                self._count(value.untyped_storage(), value.fake_device.type == "cpu")
            elif isinstance(value, (list, tuple)):
                self._count_values(value)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as that phase."""
        before, self._phase = self._phase, name
        self.peaks[name] = max(self.peaks.get(name, 0), self.now)
        try:
            yield
        finally:
            self._phase = before

    def resized(self, memory: torch.UntypedStorage) -> None:
        """Count memory that was given back, or taken again, under its tensors."""
        if memory._cdata in self._sizes:
            self._count(memory, self._sizes[memory._cdata][1])

    def _count(self, memory: torch.UntypedStorage, host: bool) -> None:
        key, size = memory._cdata, memory.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(memory, self._gone, key, host)
        elif known[0] == size:
            return
        self._sizes[key] = size, host
        self._add(size - (known[0] if known else 0), host)

    def _add(self, size: int, host: bool) -> None:
        if host:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
            return
        self.now += size
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.now)

    def _gone(self, key: int, host: bool) -> None:
        self._add(-self._sizes.pop(key, (0, host))[0], host)
