"""What vLLM's CPU build needs of us: packed matrices remade after an update, and memory given back while it sleeps.

vLLM's own sleep frees nothing on a CPU.  The pages of the KV cache, and at level 2 those of the weights, are handed
back to the kernel (madvise, MADV_DONTNEED); the tensors stay where they are and read as zeros until something is
written, when the kernel gives new pages.  So an engine that wakes has the memory again without asking for it: for the
weights by the update, for the cache by the next requests.  The CPU build multiplies with packed copies of its matrices,
which the update remakes: at level 2 they go too, and malloc returns its free memory to the system.

Invariants: only whole pages of our own anonymous memory go, the rest of a tensor is set to zero; buffers, which no
update brings, stay; a layer whose packed copy is gone refuses to multiply.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from hpcrl.utils.untrusted_files import read_system

Kernels = list[tuple[Any, Any]]


def pack_heads(model: nn.Module) -> None:
    """Remake the packed copies of all embeddings and heads from their weights."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


def drop_expert_kernels(model: nn.Module) -> Kernels:
    """Make the experts be packed again when their weights arrive; returns what to put back where none arrive."""
    dropped = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            dropped.append((method, method.moe_kernel))
            method.moe_kernel = None
    return dropped


def return_expert_kernels(dropped: Kernels) -> None:
    """Undo `drop_expert_kernels` for the layers that an update did not reach."""
    for method, kernel in dropped:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


MADV_DONTNEED = 4
LIBC = ctypes.CDLL(None, use_errno=True)
PACKED = "cpu_linear"  #: vLLM's name of a layer's multiplication with its packed copy


def give_back(model: nn.Module, caches: list[Any], level: int) -> int:
    """Give back the KV caches, at level 2 the weights too; by how many bytes the process's own memory has shrunk.

    Args:
        caches: tensors, or lists of them.
    """
    before = anonymous_bytes()
    tensors = list(_flat(caches))
    if level > 1:
        tensors += [parameter.data for parameter in model.parameters()]
        for layer in model.modules():
            if PACKED in vars(layer):
                setattr(layer, PACKED, _asleep)
    seen: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and (memory := tensor.untyped_storage()).nbytes():
            seen[memory.data_ptr()] = memory
    for memory in seen.values():
        _drop(memory.data_ptr(), memory.nbytes())
    gc.collect()
    if trim := getattr(LIBC, "malloc_trim", None):  # glibc's; with another malloc in its place it does no harm
        trim(0)
    return max(0, before - anonymous_bytes())


def anonymous_bytes() -> int:
    """What this process has in memory that no file holds."""
    for line in read_system("/proc/self/status").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


def _flat(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _flat(one)


def _asleep(*_: Any) -> NoReturn:
    raise RuntimeError("this layer's weights were given back, and no update has brought them")


def _drop(start: int, size: int) -> None:
    """Hand the whole pages of [start, start + size) back to the kernel, and set the ends to zero."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        ctypes.memset(start, 0, size)
        return
    if LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, start + size - last)
