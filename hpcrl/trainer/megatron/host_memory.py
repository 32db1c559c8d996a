"""A rank's state in host memory: the trained one while it is offloaded, and further sets of weights.

    state = DeviceState([policy, critic])
    state.put_away_rest()        # gradients and optimizer; the weights can still be exported
    state.put_away_weights()     # the device holds nothing of them any more
    state.come_back()

    reference = HostWeights(policy)          # a copy of the weights as they are, or of those that a function fills in
    with reference.swapped_in():
        ...                                  # the policy's modules hold the second set, the host memory the first
    reference.follow()                       # the policy becomes the second set

What DeviceState moves is the memory under the tensors (`UntypedStorage.resize_`, as Megatron's own offloading of its
buffers does), so that every view of it, Megatron's flat buffers included, is the same tensor afterwards.

Invariants: weights and optimizer come back bit for bit, and so do two sets that change places; gradients come back as
zeros, with which every optimizer step begins; memory that several tensors share moves once; host memory is pinned where
there is a GPU, and reused; a swap takes PIECE bytes on the device, whatever the size of the model, and touches neither
the optimizer, nor its full-precision copies, nor the random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.errors import UsageError
from hpcrl.models.lora.matrices import is_adapter
from hpcrl.trainer.lora.layer import switched

if TYPE_CHECKING:
    from hpcrl.trainer.megatron.model import Policy

#: bytes on the device while two sets change places
PIECE = 16 * 2**20


class HostWeights:
    """This rank's part of a second set of weights.

    Attributes:
        values: the set in host memory, by the names of `weights`: what a checkpoint must keep.
        fill: puts the second set into the policy's modules, which are as they were when this returns; without it the
            set is a copy of the policy's.

    Raises:
        UsageError: if the weights are quantised.
    """

    def __init__(self, policy: Policy, fill: Callable[[], object] | None = None) -> None:
        self._policy = policy
        _refuse_quantised(policy, "of such weights no second set can be held", "the reference model and the old actor")
        self.values = {name: _host_copy(value) for name, value in weights(policy).items()}
        if fill is not None:
            fill()
            self.exchange()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the policy's modules hold this set, without adapters if it is one of a whole model; for forward
        passes alone."""
        self.exchange()
        with switched(self._policy.modules if self._policy.part == "model" else (), "is_on", False):
            try:
                yield
            finally:
                self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """The policy's weights and this set change places."""
        for name, value in weights(self._policy).items():
            for device, host in _pieces(value, self.values[name]):
                kept = device.clone()
                device.copy_(host, non_blocking=True)
                host.copy_(kept, non_blocking=True)
                del kept  # before the next piece
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def follow(self) -> None:
        """Become the policy's weights."""
        for name, value in weights(self._policy).items():
            self.values[name].copy_(value)

    def counterpart(self, weight: torch.Tensor) -> torch.Tensor:
        """This set's tensor for one of the policy's weights, in new memory where that one is."""
        name = next(name for name, value in weights(self._policy).items() if _same(value, weight))
        return self.values[name].to(weight.device, copy=True, non_blocking=True)


def is_plain(value: torch.Tensor) -> bool:
    """Whether all of the tensor is in its one piece of memory, as none is that Transformer Engine quantises."""
    return type(value) is torch.Tensor


def _refuse_quantised(policy: Policy, why: str, instead: str) -> None:
    if odd := next((name for name, value in weights(policy).items() if not is_plain(value)), None):
        raise UsageError(f"{odd} is not a plain tensor, and {why}", f"leave out fp8_param, or {instead}")


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Every parameter and saved buffer of this rank's part of the policy, by the number of its chunk and its name in
    it."""
    return {
        f"{chunk}.{name}": value.data
        for chunk, module in enumerate(policy.modules)
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and "_extra_state" not in name
        if is_adapter(name) == policy.of_adapters
    }


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both begin in the same memory, which has no address on a device that knows shapes alone."""
    storages = value.untyped_storage()._cdata, other.untyped_storage()._cdata
    return storages[0] == storages[1] and value.storage_offset() == other.storage_offset()


def _host_copy(value: torch.Tensor) -> torch.Tensor:
    """In memory that a GPU can copy from and to by itself, where there is one."""
    host: Any = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return host.copy_(value)


def _pieces(value: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as flat views, some PIECE bytes at a time."""
    count = max(1, PIECE // value.element_size())
    yield from zip(value.view(-1).split(count), host.view(-1).split(count), strict=True)


#: what belongs to a parameter in addition to its values
GRADIENTS = ("grad", "main_grad", "decoupled_grad")
COPIES = ("main_param",)


class Parked:
    """Memory of the device and its place on the host.

    Attributes:
        empty: what was there need not be kept.
    """

    def __init__(self, memory: torch.UntypedStorage, empty: bool) -> None:
        self.memory = memory
        self.size = memory.nbytes()
        self.empty = empty
        self._host: torch.UntypedStorage | None = None

    def leave(self) -> None:
        """Copy it to the host, and free it.  The copy may still be under way on a GPU."""
        if not self.empty:
            if self._host is None:
                pinned = self.memory.device.type != "cpu"
                self._host = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            self._host.copy_(self.memory, non_blocking=False)
        self.memory.resize_(0)

    def come_back(self) -> None:
        """The same memory with the same contents, zeros if it was empty."""
        if self.memory.nbytes():
            return
        self.memory.resize_(self.size)
        if self._host is not None:
            self.memory.copy_(self._host, non_blocking=False)
        else:
            self.memory.fill_(0)


class DeviceState:
    """All that the trained models of a rank have on its device.

    Raises:
        UsageError: if a model's weights are not plain tensors.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._parked: dict[int, Parked] = {}
        for policy in self._policies:
            _refuse_quantised(policy, "cannot be offloaded", "give --no-offload-train")

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
