"""A second set of a model's weights, in host memory, that takes the place of the first for a while.

    reference = HostWeights(policy)          # a copy of the weights as they are, or of those that a function fills in
    with reference.swapped_in():
        ...                                  # the policy's modules hold the second set, the host memory the first
    reference.follow()                       # the policy becomes the second set

Invariants: the two sets change places bit for bit; that costs PIECE bytes on the device, whatever the size of the
model; the optimizer, its full-precision copies and the random numbers are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.errors import UsageError

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

#: bytes on the device while two sets change places
PIECE = 16 * 2**20


class HostWeights:
    """This rank's part of a second set of weights.

    fill: puts the second set into the policy's modules, which are as they were when this returns; without it the set is
    a copy of the policy's.  average: the second set moves towards the policy only in part, which needs it in fp32
    beside the dtype of the weights.  UsageError if the weights are quantised.
    """

    def __init__(self, policy: Policy, fill: Callable[[], object] | None = None, *, average: bool = False) -> None:
        self._policy = policy
        if odd := next((name for name, value in weights(policy).items() if type(value) is not torch.Tensor), None):
            raise UsageError(
                f"{odd} is no plain tensor, and of such weights no second set can be held",
                "leave out fp8_param, or the reference model and the old actor",
            )
        self._host = {name: _host_copy(value) for name, value in weights(policy).items()}
        if fill is not None:
            fill()
            self.exchange()
        self._average = {name: value.float() for name, value in self._host.items()} if average else {}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        parts = {value.data_ptr(): value for value in (*self._host.values(), *self._average.values())}
        return sum(value.nbytes for value in parts.values())

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the policy's modules hold this set; for forward passes alone."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """The policy's weights and this set change places."""
        for name, value in weights(self._policy).items():
            for device, host in _pieces(value, self._host[name]):
                kept = device.clone()
                device.copy_(host, non_blocking=True)
                host.copy_(kept, non_blocking=True)
                del kept  # before the next piece
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def follow(self, share: float = 1.0) -> None:
        """Become share x the policy's weights + (1 - share) x this set; a share below 1 needs `average`."""
        for name, value in weights(self._policy).items():
            if share >= 1.0 or not value.is_floating_point():
                self._host[name].copy_(value)
                if self._average:
                    self._average[name].copy_(value)
                continue
            for device, average in _pieces(value, self._average[name]):
                average.lerp_(device.to("cpu", torch.float32), share)
            self._host[name].copy_(self._average[name])

    def counterpart(self, weight: torch.Tensor) -> torch.Tensor:
        """What stands in this set for one of the policy's weights, in new memory where that one is."""
        name = next(name for name, value in weights(self._policy).items() if value.data_ptr() == weight.data_ptr())
        return self._host[name].to(weight.device, copy=True)

    # ---- in and out of checkpoints

    def stored(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep, by the names of `weights`: the average where there is one."""
        return self._average or self._host

    @torch.no_grad()
    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Become what `stored` gave."""
        for name, value in values.items():
            self._host[name].copy_(value)
            if self._average:
                self._average[name].copy_(value)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Every parameter and saved buffer of this rank, by the number of its chunk and its name in it."""
    return {
        f"{chunk}.{name}": value.data
        for chunk, module in enumerate(policy.modules)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and "_extra_state" not in name
    }


def _host_copy(value: torch.Tensor) -> torch.Tensor:
    """In memory that a GPU can copy from and to by itself, where there is one."""
    host: Any = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return host.copy_(value)


def _pieces(value: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as flat views, some PIECE bytes at a time."""
    count = max(1, PIECE // value.element_size())
    yield from zip(value.view(-1).split(count), host.view(-1).split(count), strict=True)
