"""What of torch, Megatron and hpcrl is another while a process has the device of device.py: a machine with a GPU,
groups that are fake, and waits that are seen.

Invariant: what is replaced is put back as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

NAME = "acc"  #: not "cuda": torch for the CPU has no guard for CUDA devices, views and backward passes fail there
BACKEND = "fake"


def device() -> torch.device:
    """The only device."""
    return torch.device(NAME, 0)


class WaitRecorder(Protocol):
    """What is asked of the device."""

    def operations(self) -> TorchDispatchMode: ...

    def wait(self, what: str) -> object: ...

    def is_pinned(self, tensor: torch.Tensor) -> bool: ...

    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def resized(self, memory: torch.UntypedStorage) -> None: ...


def replace_all(owner: WaitRecorder, packages: frozenset[str]) -> Callable[[], None]:
    """Let the machine have a GPU with `packages`, groups of any backend be fake, and synchronize() be seen; gives what
    puts all of it back."""
    from hpcrl.trainer import collectives
    from hpcrl.trainer.checkpoint import writers
    from hpcrl.trainer.megatron import host_memory
    from hpcrl.trainer.megatron.capabilities import Machine, find_kernels

    machine = Machine(True, packages, find_kernels())
    stock_group = dist.new_group
    asked: dict[Any, str] = {}  # group -> its backend, as its maker wants it; NCCL where nothing is said

    def new_group(*args: Any, **more: Any) -> Any:
        made = stock_group(*args, **more | {"backend": BACKEND})
        asked[made] = more.get("backend") or "nccl"
        return made

    write_file = writers._write_file

    def in_thread(*arguments: Any) -> Any:  # which has modes of its own
        with owner.operations():
            return write_file(*arguments)

    changes: list[tuple[Any, str, Any]] = [
        (Machine, "here", staticmethod(lambda: machine)),
        (collectives, "device", lambda group=None: torch.device("cpu") if asked.get(group) == "gloo" else device()),
        (dist, "new_group", new_group),
        (dist.distributed_c10d, "new_group", new_group),
        (dist, "get_backend", lambda group=None: asked.get(group, "nccl")),
        (writers, "_write_file", in_thread),
        (torch.cuda.nccl, "version", lambda: (2, 29, 7)),  # torch asks as a checkpoint is loaded
        (host_memory, "is_plain", lambda tensor: type(tensor) in (torch.Tensor, FakeTensor)),
        *_of_memory(owner),
        (torch.nn.Module, "_apply", _apply),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.Tensor, "is_pinned", lambda tensor, *_: owner.is_pinned(tensor)),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor if tensor.is_pinned() else owner.pin(tensor.clone())),
        (FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == NAME)),
        (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),  # its own asks for every number
        (torch.cuda, "synchronize", lambda *_: owner.wait("synchronize the device")),
        (torch.cuda.Stream, "synchronize", lambda *_: owner.wait("synchronize a stream")),
        (torch.cuda.Event, "synchronize", lambda *_: owner.wait("synchronize an event")),
        (torch, "tensor", of_numbers(owner, torch.tensor)),
        (torch, "as_tensor", of_numbers(owner, torch.as_tensor)),
    ]
    before = [(target, name, vars(target).get(name)) for target, name, _ in changes]
    for target, name, value in changes:
        setattr(target, name, value)

    def back() -> None:
        for target, name, value in before:
            delattr(target, name) if value is None else setattr(target, name, value)

    return back


def _of_memory(owner: WaitRecorder) -> list[tuple[Any, str, Any]]:
    """What gives and takes memory past the operations: NCCL's (--nccl-ub), whose library is not built here, is as much
    as any other."""
    from megatron.core import nccl_allocator

    resize = torch.UntypedStorage.resize_

    def resized(memory: torch.UntypedStorage, size: int) -> Any:
        found = resize(memory, size)
        owner.resized(memory)
        return found

    return [
        (torch.UntypedStorage, "resize_", resized),
        (nccl_allocator, "init", lambda: None),
        (nccl_allocator, "create_nccl_mem_pool", lambda *_, **__: None),
        (nccl_allocator, "nccl_mem", lambda *_, **__: nullcontext()),
    ]


def of_numbers(owner: WaitRecorder, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor and torch.as_tensor: of tensors in a list they ask for the numbers where no mode looks."""

    def made(data: Any, *args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = tree_map_only(FakeTensor, torch.Tensor.item, data)
        found = stock(data, *args, **more)
        return owner.pin(found) if pin_memory else found

    return made


def _apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """torch's own exchanges the contents of two fake parameters, which it refuses once Megatron has a reference to
    one."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            found = fn(parameter)
        if isinstance(found, FakeTensor) == isinstance(parameter, FakeTensor):
            parameter.data = found
            continue
        made = torch.nn.Parameter(found, parameter.requires_grad)
        for key, value in vars(parameter).items():  # tensor_model_parallel, allreduce, ...
            if key not in vars(made):
                setattr(made, key, value)
        module._parameters[name] = made
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else fn(buffer)
    return module
