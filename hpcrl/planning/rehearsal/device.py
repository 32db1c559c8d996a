"""An accelerator that knows shapes and no numbers, so that a CPU can fail where a GPU would: by rank, byte and wait.

    on_fake_device(function, ...)                # of tests/support/ranks.py: a process of its own
    def function():
        with FakeDevice() as device:
            ranks = join(options, rank=3)        # one process is rank 3 of the layout; collectives return at once
            policy = model.build(options, ranks)
            ...
        return device.syncs                      # what waited for the device, or copied from or to pageable memory

torch's hook for devices that are written in Python, FakeTensorMode and its fake process group; Megatron's "cuda" is
this device (`replaced.install`).  Tensors of the device have shape, strides, storage and no content, and so have large
ones of the CPU; its others are real.  Which is why bytes can be counted (`live_bytes`): the device's mode sees every
operation with its arguments and results, whose `untyped_storage()` says how large they are and (`_cdata`) whether two
share memory.  `device.is_pinned(tensor)` knows pinned host memory.

What reads the device gets zeros, or what `device.answers` says for that place.

Invariants: nothing that a GPU would wait for, or could not do without waiting, passes unrecorded: a value or an amount
of data that is read (`.item()`, boolean masks, `nonzero`), a copy between the device and pageable memory, or a blocking
one at all, `synchronize()` of a stream, an event or the device; each with the innermost line of hpcrl or Megatron.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hpcrl.config.megatron_flags import PARTS
from hpcrl.planning.rehearsal.collectives import Recorder
from hpcrl.planning.rehearsal.device_properties import MEGATRONS, Answer
from hpcrl.planning.rehearsal.live_bytes import DeviceBytes
from hpcrl.planning.rehearsal.patches import BACKEND, NAME, device, replace_all
from hpcrl.planning.rehearsal.shape_cache import ShapeCache

LARGE = 1 << 20  #: elements of host memory from which on it has no content either
PACKAGES = ("hpcrl", "megatron")  #: whose lines are named
aten = torch.ops.aten
prim = torch.ops.prim
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sync:
    """One wait.

    Attributes:
        what: the operation.
        file, function, line, text: where, from the package's name on ("hpcrl/trainer/..."); "backward" in place of a
            file where torch's engine was on its own.
    """

    what: str
    file: str
    function: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}: {self.text}"


def install() -> None:
    """Make the device, once in a process and before anything imports Megatron."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    from hpcrl.trainer.megatron import replaced

    module = _DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    _setup_privateuseone_for_python_backend(NAME, module)
    replaced.install(NAME)
    dist.Backend.backend_capability[BACKEND].append(NAME)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes a CPU tensor and copies it


def join(options: Any, rank: int = 0) -> Any:
    """Be `rank` of the options' layout, in Megatron's groups; leaves those of an earlier call."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpcrl.trainer import parallel_state

    if dist.is_initialized():
        parallel_state.shutdown()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.world_size), LOCAL_RANK="0")
    real = dist.init_process_group
    fake = lambda _, store, timeout, **place: real(BACKEND, store=FakeStore(), **place)  # noqa: E731
    with mock.patch.object(dist, "init_process_group", fake):
        return replace(parallel_state.initialize(options, FakeStore()), device=device())


class FakeDevice:
    """Within, tensors may be on the device.

    Attributes:
        syncs: every wait, in order.
        answers: (end of the file's path, function) -> what is read there.
        recorder: of calls to process groups; None: nothing is recorded.
        live: counts bytes; None: nothing is counted.
    """

    def __init__(self, packages: Sequence[str] | None = None, large: float = LARGE) -> None:
        """Create one.

        Args:
            packages: of `capabilities.PARTS` that the machine is to have (None: the stand-ins of this process).
            large: elements of host memory from which on it has no content either; math.inf: what is saved is read.
        """
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.shapes = ShapeCache(self.fake)
        self._large = large
        self.syncs: list[Sync] = []
        self.recorder: Recorder | None = None
        self.live: DeviceBytes | None = None
        self.answers: dict[tuple[str, str], Answer] = dict(MEGATRONS)
        stood_in = {name for names in PARTS.values() for name in names if name in sys.modules}
        self._packages = frozenset(stood_in if packages is None else packages)
        self._pinned: set[int] = set()

    def __enter__(self) -> FakeDevice:
        self._stack = ExitStack()
        self._stack.callback(replace_all(self, self._packages))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def operations(self) -> TorchDispatchMode:
        """A mode for a thread of its own, which takes none along."""
        return _Operations(self)

    # ---- waits

    def wait(self, what: str) -> FrameType | None:
        """Record one; the frame of its place."""
        place = None
        for frame in frames():
            if place is None:
                place = frame
            if self._answer(frame):
                place = frame
                break
        if place is None:
            self.syncs.append(Sync(what, "backward", "", 0, ""))
            return None
        code = place.f_code
        summary = traceback.FrameSummary(code.co_filename, place.f_lineno, code.co_name)
        self.syncs.append(Sync(what, _short(code.co_filename), code.co_name, place.f_lineno, summary.line or ""))
        return place

    def read(self, what: str, tensor: torch.Tensor) -> Any:
        """Record that `tensor` is read; what there is to read: None if nothing is said for that place."""
        place = self.wait(what)
        answer = self._answer(place) if place else None
        return answer(place, tensor) if answer and place else None

    def _answer(self, frame: FrameType) -> Answer | None:
        path, name = _short(frame.f_code.co_filename), frame.f_code.co_name
        return next((a for (end, where), a in self.answers.items() if where == name and path.endswith(end)), None)

    def resized(self, memory: torch.UntypedStorage) -> None:
        """Have it counted that a tensor's memory is of another size."""
        if self.live is not None:
            self.live.resized(memory)

    # ---- host memory

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that holds zeros; if there is much of it, nothing."""
        if math.prod(shape) < self._large:
            return torch.zeros(shape, dtype=dtype)
        with self.fake:
            return torch.empty(shape, dtype=dtype, device="cpu")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the CPU tensor count as pinned."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is a CPU tensor in pinned memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage()._cdata in self._pinned


def frames() -> Iterator[FrameType]:
    """Those of PACKAGES, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if _short(frame.f_code.co_filename).startswith(PACKAGES):
            yield frame
        frame = frame.f_back


@cache
def _short(path: str) -> str:
    parts = Path(path).parts
    found = [i for i, part in enumerate(parts) if part in PACKAGES]
    # a checkout may be called hpcrl itself, and hold the environment of what is installed
    if not found or "tests" in parts or "site-packages" in parts[found[-1] :]:
        return path
    return path if parts[found[-1] :][1:2] == ("planning",) else "/".join(parts[found[-1] :])


def _any_on(values: Iterable[Any]) -> bool:
    """Whether a tensor without content is among them, or the device."""
    for value in values:
        if isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == NAME):
            return True
        if isinstance(value, (list, tuple)) and _any_on(value):
            return True
    return False


class _Operations(TorchDispatchMode):
    """Operations that touch the device are made by shape alone; the others are left alone."""

    def __init__(self, owner: FakeDevice) -> None:
        super().__init__()
        self.owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's compiler is not there: its guard around each operation takes a fifth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default:  # half of all calls
            return args[0].device
        kwargs = kwargs or {}
        owner = self.owner
        if owner.recorder is not None and _namespace(func) == "c10d":
            owner.recorder.record(func, args)
        if kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        if not (FakeTensor in types or _any_on(args) or (kwargs and _any_on(kwargs.values()))):
            return func(*args, **kwargs)
        found = self._shaped(func, args, kwargs)
        if owner.live is not None:
            owner.live.count_operation(args, kwargs, found)
        return found

    def _shaped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._to_copy.default:
            return self._to(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            found = self.owner.read("item", args[0])
            return float(found or 0) if args[0].dtype.is_floating_point else found or 0
        if func in (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
            self._masked(*args)
        if _namespace(func) == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        try:
            return self.owner.shapes.run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._unknown(func, args)

    def _pinned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """New host memory that is pinned: what is not written to takes none."""
        made = func(*args, **kwargs | {"pin_memory": False})
        return self.owner.pin(made if made.numel() < LARGE else self.owner.host(made.shape, made.dtype))

    def _to(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """`_to_copy`: `.to`, `.cpu()`, `.float()`, `torch.tensor(..., device=)`."""
        target = kwargs.get("device") or source.device
        if source.device.type == target.type:
            return self.owner.shapes.run(aten._to_copy.default, (source,), kwargs)
        dtype = kwargs.get("dtype") or source.dtype
        if target.type == NAME:
            self._host_to_device(source, kwargs.get("non_blocking", False))
            with self.owner.fake:
                return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=device())
        return self._device_to_host(source, kwargs.get("non_blocking", False), dtype)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if to.device.type == source.device.type:
            return self.owner.shapes.run(aten.copy_.default, (to, source, non_blocking), {})
        if to.device.type == NAME:
            # a number that is written into a tensor goes with the kernel
            if source.dim() or non_blocking:
                self._host_to_device(source, non_blocking)
            return to
        if not (non_blocking and self.owner.is_pinned(to)):
            to.copy_(self._device_to_host(source, False, to.dtype))
        return to

    def _host_to_device(self, source: torch.Tensor, non_blocking: bool) -> None:
        if not self.owner.is_pinned(source):
            self.owner.wait("copy from pageable memory")
        elif not non_blocking:
            self.owner.wait("blocking copy to the device")

    def _device_to_host(self, source: torch.Tensor, non_blocking: bool, dtype: torch.dtype) -> torch.Tensor:
        if non_blocking:  # torch makes pinned memory for it, and what reads it synchronizes first
            place = next((frame for frame in frames() if self.owner._answer(frame)), None)
            found = self.owner._answer(place)(place, source) if place else None
        else:
            found = self.owner.read("copy to the host", source)
        made = self.owner.host(source.shape, dtype) if found is None else torch.as_tensor(found, dtype=dtype)
        return self.owner.pin(made) if non_blocking else made

    def _masked(self, _: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, *__: Any) -> None:
        masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
        if masks and values.numel() != 1:  # one number is filled in without looking
            self.owner.wait("boolean mask")

    def _unknown(self, func: Any, args: Any) -> Any:
        """What has a size, or a value, that only the device knows."""
        tensor = next(a for a in tree_flatten(args)[0] if isinstance(a, FakeTensor))
        found = self.owner.read(str(func), tensor)
        with self.owner.fake:
            if func is aten._unique2.default:  # of numbers that are all different
                places = torch.empty(tensor.shape, dtype=torch.int64, device=device())
                return tensor.flatten(), places, places.flatten()
            if func is aten.nonzero.default:  # masks are full
                return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=device())
            if func is aten.masked_select.default:
                return tensor.new_empty(tensor.numel() if found is None else found)
            if func is aten.index.Tensor and len(args[1]) == 1:
                return tensor.clone()
            if func is aten.bincount.default:
                return tensor.new_empty(tensor.numel())
        raise RuntimeError(f"only the device knows what is read: {self.owner.syncs[-1]}")


_namespaces: dict[int, str] = {}


def _namespace(func: Any) -> str:
    """Of a torch operation, which are never freed."""
    found = _namespaces.get(id(func))
    if found is None:
        found = _namespaces[id(func)] = func.namespace
    return found
