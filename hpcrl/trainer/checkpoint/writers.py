"""Writing the files of a checkpoint, tensor by tensor, one thread a file: in this process, or in one that was forked.

Megatron's own writer forks a process for each file (a later release uses threads), from one that has been forked itself
and has threads by then; it waits for ever for one that is killed, or that a lock which no thread will release holds up.

Invariants: what goes wrong in a thread is the result, and is raised by nothing here; no process is started.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def write_in_place(state: dict[str, Any]) -> None:
    """Let Megatron's writer copy nothing of a sharded state dict that is on the host."""
    apply_factories(state)
    dict_list_map_inplace(_alone, state)


def _alone(value: Any) -> Any:
    """A tensor on the host with a storage of its own, in the same memory; anything else as it is.

    Of one that is a part of a larger storage Megatron's writer would make a copy, since torch.save writes all of a
    storage.
    """
    if not isinstance(value, ShardedTensor) or value.data.device.type != "cpu" or not value.data.is_contiguous():
        return value
    data = value.data.detach()
    if data.nbytes in (0, data.untyped_storage().nbytes()):
        return value
    # not `data.numpy()`: its memory could not be resized any more, by which a rank that takes turns puts its state away
    interface = {"version": 3, "typestr": "|u1", "shape": (data.nbytes,), "data": (data.data_ptr(), False)}
    flat = torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, owner=data)))
    return replace(value, data=flat.view(data.dtype).view(data.shape))


def private(buckets: list[Any]) -> list[Any]:
    """The same files, with copies of what a forked process would see change: pinned memory is the driver's, and stays
    shared after a fork."""
    return [
        (path, name, (objects, [(item, t.clone() if t.is_pinned() else t) for item, t in tensors]))
        for path, name, (objects, tensors) in buckets
    ]


def write_here(request: Any) -> None:
    """Write this rank's part of a checkpoint: what Megatron's AsyncRequest asks for, if anything.

    In this process: of what is on the GPU each thread has one tensor at a time in host memory. What goes wrong is put
    among the results, which Megatron's finalize functions look at on all ranks.
    """
    if request.async_fn is None:
        return
    _, buckets, results = request.async_fn_args
    torch.cuda.synchronize()  # the threads copy on streams of their own
    results.put(write_files(transforms(request), buckets))


def transforms(request: Any) -> list[Any]:
    """Torch's, which Megatron's writer has bound."""
    return request.async_fn.args[0]


def write_files(transforms: list[Any], buckets: list[Any]) -> dict[int, Any] | Exception:
    """Write the files; what Megatron puts among the results: of each what was written, or what went wrong first."""
    with ThreadPoolExecutor(len(buckets), "checkpoint") as threads:
        written = dict(threads.map(lambda job: _write_file(transforms, *job), enumerate(buckets)))
    failed = [result for result in written.values() if isinstance(result, Exception)]
    return failed[0] if failed else written


def _write_file(transforms: list[Any], number: int, bucket: Any) -> tuple[int, Any]:
    """Write one file as Megatron does, with tensors that come from the GPU one after another; (its number, what was
    written or the exception)."""
    path, name, (objects, tensors) = bucket
    answer: queue.Queue[tuple[int, Any]] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(number)
    one_by_one = ((item, tensor.cpu()) for item, tensor in tensors)
    FileSystemWriterAsync.write_preloaded_data(
        transforms, number, (path, name, (objects, one_by_one)), answer, running, use_fsync=True
    )
    return answer.get_nowait()
