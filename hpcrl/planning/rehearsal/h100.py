"""A machine with H100s as vLLM sees it, in a process of its own on a machine without a GPU.

What of vLLM and torch is another in that process is here, and nowhere else. Each part says what such a machine is or
has, or does nothing: the choices are vLLM's. Packages of a GPU's machine count as installed in the version that vLLM
asks for: FlashInfer (its build tools are looked for), the DeepGEMM that vLLM's wheel brings, DeepEP, Triton.

Invariant: `install` comes before the first import of vLLM and is not undone; no kernel runs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

GIB = 1 << 30
NODE = 8  #: GPUs of a host
#: compiled parts of the CUDA wheel, and packages that it depends on or brings along
STOOD_IN = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.third_party.deep_gemm",
    "flashinfer",
    "deep_ep",
)
#: what vLLM asks of them: rows that DeepGEMM pads the rows of an expert to
ANSWERS = {"get_mk_alignment_for_contiguous_layout": lambda: 128}


class H100Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of those names, which have whatever is asked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(f"{name}.".startswith(f"{known}.") for known in STOOD_IN):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _attribute  # type: ignore[method-assign]


class Idle:
    """A stream, an event or a communicator that nothing is sent through."""

    disabled = True

    def __init__(self, *_: Any, **__: Any) -> None: ...


class TritonConfig:
    """Numbers with which a kernel may be compiled."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **_: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class StoodIn(type):
    """A class whose every attribute is another: what is called does nothing."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)


def _attribute(name: str) -> Any:
    """Whatever a stood-in module is asked for: a class, which may stand in an annotation."""
    if name.startswith("__"):
        raise AttributeError(name)
    return ANSWERS.get(name) or StoodIn(name, (Idle,), {})


class Kernel:
    """A compiled function, or a namespace of them. Asked whether it supports a GPU it says yes, as those for Hopper do
    in a wheel of CUDA 12.9 or newer; it does nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> bool:
        if "support" in self._name:
            return True
        raise RuntimeError(f"a rehearsal runs no kernel, and {self._name} was called")


def install(gpus: int) -> None:
    """Let vLLM find a machine with `gpus` H100s of 80 GB, all linked."""
    sys.meta_path.insert(0, H100Modules())
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
        "get_device_name": classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3"),
        "get_device_total_memory": classmethod(lambda cls, device_id=0: 80 * GIB),
        "get_device_uuid": classmethod(lambda cls, device_id=0: f"GPU-{device_id}"),
        "num_compute_units": classmethod(lambda cls, device_id=0: 132),
        "device_count": classmethod(lambda cls: gpus),
        "is_fully_connected": classmethod(lambda cls, ids: True),
        "is_cumem_allocator_available": lambda self: True,
    }
    vllm.platforms.current_platform = type("H100", (CudaPlatformBase,), answers)()  # vLLM's module asks for it by name
    importlib.import_module("vllm._custom_ops")  # which registers shapes of the operations that there are

    vars(torch.ops)["_C"], vars(torch.ops)["_moe_C"] = Kernel("_C"), Kernel("_moe_C")
    torch.cuda.Stream, torch.cuda.Event = Idle, Idle  # type: ignore[misc,assignment]
    import vllm.triton_utils
    from vllm.config import vllm as of_engine
    from vllm.model_executor.models import registry

    of_engine.HAS_TRITON = True  # type: ignore[attr-defined]
    if not vllm.triton_utils.HAS_TRITON:  # whose placeholder is a function
        vllm.triton_utils.triton.Config = TritonConfig
    # a process of its own for the model's class would be without all this
    registry._run_in_subprocess = lambda look: look()


def join_groups(parallel: Any) -> None:
    """Make this process rank 0 of the engine, in groups of the real size whose other ranks are not there; NCCL's
    communicators and those of custom kernels are not made, and so say nothing."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import custom_all_reduce, flashinfer_all_reduce, pynccl, symm_mem
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    custom_all_reduce.CustomAllreduce = flashinfer_all_reduce.FlashInferAllReduce = Idle  # type: ignore[misc,assignment]
    pynccl.PyNcclCommunicator = symm_mem.SymmMemCommunicator = Idle  # type: ignore[misc,assignment]
    MessageQueue.create_from_process_group = Idle  # type: ignore[assignment]  # which would wait for its readers
    stock = dist.new_group
    dist.new_group = lambda *args, **more: stock(*args, **more | {"backend": "fake"})  # gloo would wait for the others
    torch.distributed.new_group = dist.new_group
    parallel_state.in_the_same_node_as = _on_node
    dist.init_process_group("fake", rank=0, world_size=parallel.world_size_across_dp, store=FakeStore())
    parallel_state.init_distributed_environment(parallel.world_size, 0, "", 0, "fake")
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
    )


def _on_node(group: Any, source_rank: int = 0) -> Sequence[bool]:
    return [rank // NODE == source_rank // NODE for rank in range(group.size())]
