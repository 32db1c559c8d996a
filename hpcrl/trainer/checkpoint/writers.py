"""Writing the files of a checkpoint, tensor by tensor, one thread a file: in this process, or in one that was forked.

Megatron's own writer forks a process for each file (a later release uses threads), from one that has been forked itself
and has threads by then; it waits for ever for one that is killed, or that a lock which no thread will release holds up.

Invariants: what goes wrong in a thread is the result, and is raised by nothing here; no process is started.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.process import die_with_parent
from hpcrl.utils.waiting import Deadline

ENDING: Final = 10.0  #: seconds that a writer which has written may take to end


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


def write_here(request: Any) -> None:
    """Write this rank's part of a checkpoint: what Megatron's AsyncRequest asks for, if anything.

    In this process: of what is on the GPU each thread has one tensor at a time in host memory. What goes wrong is put
    among the results, which Megatron's finalize functions look at on all ranks.
    """
    if request.async_fn is None:
        return
    _, buckets, results = request.async_fn_args
    torch.cuda.synchronize()  # the threads copy on streams of their own
    results.put(write_files(request.async_fn.args[0], buckets))


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


# ---- in a process that was forked


class CheckpointWriter:
    """A forked process that writes this rank's part of a checkpoint, from memory as it is at the fork."""

    def __init__(self, request: Any) -> None:
        _, buckets, self.results = request.async_fn_args
        if request.preload_fn is not None:
            # GPU tensors into host memory, which the driver pins, and which stays shared after a fork: copies of that;
            # those on the CPU are shared until one side writes
            buckets = [
                (path, name, (objects, [(item, t.clone() if t.is_pinned() else t) for item, t in tensors]))
                for path, name, (objects, tensors) in request.preload_fn()
            ]
        context = multiprocessing.get_context("fork")
        self.mine, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_write, args=(request.async_fn.args[0], buckets, theirs), daemon=False)
        self.process.start()
        theirs.close()
        self.answer: Any = None
        self.late = False

    def end_late(self) -> None:
        """End one that has taken too long: it may wait for a lock that a thread of this process held at the fork."""
        self.late = True
        self.process.kill()

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._heard() or not self.process.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, or said what it wrote, but no longer than that; whether it has."""
        deadline = Deadline(seconds)
        while not self.done() and not deadline.over:  # one that is killed closes its pipe before it has ended
            wait([self.process.sentinel] if self.mine.closed else [self.mine, self.process.sentinel], deadline.left)
        return self.done()

    def _heard(self) -> bool:
        """Whether it has said what it wrote."""
        if self.answer is None and not self.mine.closed and self.mine.poll():
            try:
                self.answer = self.mine.recv()
            except Exception:  # noqa: BLE001  (it died, maybe while it sent this: hand_over says how)
                self.mine.close()
        return self.answer is not None

    def hand_over(self) -> None:
        """Give Megatron what was written, as if this process had.

        Raises:
            HpcrlError: if the writer was killed.
        """
        heard = self._heard()
        self.process.join(ENDING)
        if self.process.is_alive():  # it has said what it wrote: what it still does is not needed
            self.process.kill()
            self.process.join(ENDING)
        self.mine.close()
        if not heard and self.late:
            raise HpcrlError("the process that wrote it took too long, and was ended")
        if not heard:
            raise HpcrlError(f"the process that wrote it {how_it_ended(self.process.exitcode or 0)}")
        self.results.put(self.answer)


def _write(transforms: list[Any], buckets: list[Any], answer: Connection) -> None:
    """In the forked process: write, send what Megatron's writer would put among the results, and end.

    It dies with the trainer rank.  Neither the collection of garbage, nor the interpreter's end, nor OpenMP's threads,
    of which it has none, may touch what is the trainer's: CUDA objects and locks.
    """
    die_with_parent()
    gc.disable()
    torch.set_num_threads(1)
    answer.send(write_files(transforms, buckets))
    os._exit(0)
