"""A rank's state, put away into host memory and back: weights, gradients, optimizer.

    state = DeviceState([policy, critic])
    state.put_away_rest()        # gradients and optimizer; the weights can still be exported
    state.put_away_weights()     # the device holds nothing of them any more
    state.come_back()

What moves is the memory under the tensors (`UntypedStorage.resize_`, as Megatron's own offloading of its buffers does),
so that every view of it, Megatron's flat buffers included, is the same tensor afterwards.

Invariants: weights and optimizer come back bit for bit; gradients come back as zeros, which every optimizer step begins
with; memory that several tensors share moves once; host memory is pinned where there is a GPU, and kept from turn to
turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.errors import UsageError
from hpcrl.trainer.megatron.host_weights import weights

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

#: what belongs to a parameter beside its values
GRADIENTS = ("grad", "main_grad", "decoupled_grad")
COPIES = ("main_param",)


class Parked:
    """Memory of the device and its place on the host.  empty: what was there need not be kept."""

    def __init__(self, memory: torch.UntypedStorage, empty: bool) -> None:
        self.memory = memory
        self.size = memory.nbytes()
        self.empty = empty
        self.away = False
        self._host: torch.UntypedStorage | None = None

    def leave(self) -> None:
        """Copy it to the host, and free it.  The copy may still be under way on a GPU."""
        if self.away:
            return
        if not self.empty:
            if self._host is None:
                pinned = self.memory.device.type != "cpu"
                self._host = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            self._host.copy_(self.memory, non_blocking=False)
        self.memory.resize_(0)
        self.away = True

    def come_back(self) -> None:
        """The same memory with the same contents, zeros if it was empty."""
        if not self.away:
            return
        self.memory.resize_(self.size)
        if self._host is not None:
            self.memory.copy_(self._host, non_blocking=False)
        else:
            self.memory.fill_(0)
        self.away = False


class DeviceState:
    """All that the trained models of a rank have on its device.

    UsageError if a model's weights are no plain tensors.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._parked: dict[int, Parked] = {}
        for policy in self._policies:
            if odd := next((name for name, value in weights(policy).items() if type(value) is not torch.Tensor), None):
                raise UsageError(
                    f"{odd} is no plain tensor, and cannot be put away",
                    "leave out fp8_param, or give --no-offload-train",
                )

    def put_away_rest(self) -> None:
        """Gradients and optimizer leave the device."""
        for policy in self._policies:
            policy.optimizer.zero_grad()  # those that its full-precision copies have
        held = _memory(_weights(self._policies))
        gradients = _memory(_gradients(self._policies))
        optimizer = _memory(_optimizer(self._policies))
        there = held.keys() | gradients.keys() | optimizer.keys()
        self._parked = {key: parked for key, parked in self._parked.items() if key in there}
        self._leave((memory for key, memory in gradients.items() if key not in held), empty=True)
        self._leave(memory for key, memory in optimizer.items() if key not in held and key not in gradients)

    def put_away_weights(self) -> None:
        """The weights leave too."""
        self._leave(_memory(_weights(self._policies)).values())

    def come_back(self) -> None:
        """All of it is on the device again."""
        for parked in self._parked.values():
            parked.come_back()

    @property
    def bytes_away(self) -> int:
        """Bytes of device memory that have been given up."""
        return sum(parked.size for parked in self._parked.values() if parked.away)

    def _leave(self, memories: Iterable[torch.UntypedStorage], empty: bool = False) -> None:
        for memory in memories:
            if not memory.nbytes():
                continue
            if memory._cdata not in self._parked:
                self._parked[memory._cdata] = Parked(memory, empty)
            self._parked[memory._cdata].leave()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # or else it would stay ours


def _memory(tensors: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """The memory under tensors of the device that trains, each once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (tensor.is_cuda or not torch.cuda.is_available()):
            memory = tensor.untyped_storage()
            found[memory._cdata] = memory
    return found


def _weights(policies: Sequence[Policy]) -> Iterator[Any]:
    for policy in policies:
        for module in policy.modules:
            yield from module.parameters()
            yield from module.buffers()
        yield from (buffer.param_data for chunk in policy.chunks for buffer in _buffers(chunk))


def _gradients(policies: Sequence[Policy]) -> Iterator[Any]:
    for policy in policies:
        yield from (buffer.grad_data for chunk in policy.chunks for buffer in _buffers(chunk))
        for module in policy.modules:
            for parameter in module.parameters():
                yield from (getattr(parameter, name, None) for name in GRADIENTS)


def _optimizer(policies: Sequence[Policy]) -> Iterator[Any]:
    for policy in policies:
        for module in policy.modules:
            for parameter in module.parameters():
                yield from (getattr(parameter, name, None) for name in COPIES)
        for leaf in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
            inner = getattr(leaf, "optimizer", None)
            if inner is None:
                continue
            yield from (parameter for group in inner.param_groups for parameter in group["params"])
            yield from (value for state in inner.state.values() if isinstance(state, dict) for value in state.values())


def _buffers(chunk: Any) -> Iterator[Any]:
    """Megatron's flat buffers of a chunk, those of experts included."""
    yield from (*chunk.buffers, *chunk.expert_parallel_buffers)
