"""Writing the files of a checkpoint: here, tensor by tensor; or in the background, where the processes are watched.
Megatron forks one for each file (a later release uses threads), and would wait for ever for one that is killed.

Invariant: a process that waits for such a process learns within a second that it was killed, and by what; one that
fails reports its own error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import selectors
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import MemoryWatch, how_it_ended

AGAIN = 0.5  #: seconds between two looks for an ended process whose signal has not ended the wait
WAITING = (
    os.path.dirname(multiprocessing.__file__) + os.sep,
    selectors.__file__,
)  #: whose code waits for such processes


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

    One thread a file, in this process: of what is on the GPU each has one tensor at a time in host memory. What goes
    wrong is put among the results, which Megatron's finalize functions look at on all ranks.
    """
    if request.async_fn is None:
        return
    _, buckets, results = request.async_fn_args
    transforms = request.async_fn.args[0]  # torch's, which Megatron's writer has bound
    torch.cuda.synchronize()  # the threads copy on streams of their own
    with ThreadPoolExecutor(len(buckets), "checkpoint") as threads:
        written = dict(threads.map(lambda job: _write_file(transforms, *job), enumerate(buckets)))
    failed = [result for result in written.values() if isinstance(result, Exception)]
    results.put(failed[0] if failed else written)


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


@contextlib.contextmanager
def killed_writers_told() -> Iterator[None]:
    """Raise HpcrlError, out of whatever is being waited for, as soon as a process that was started in here is killed.

    A signal handler raises it, which Python runs in the main thread alone: in other threads nothing is watched.  It
    raises out of the code of multiprocessing only: what Python calls around a fork swallows an exception, and a lock of
    logging would stay held.  So the signal is sent again while an ended process has not been waited for, which also
    ends a wait that began just after the first one.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    memory = MemoryWatch()
    ours = psutil.Process()
    earlier = {child.pid for child in ours.children()}

    def look(_: int, frame: FrameType | None) -> None:
        if frame is None or not frame.f_code.co_filename.startswith(WAITING):
            return
        for child in ours.children():
            if child.pid not in earlier and (number := _killed_by(child.pid)):
                raise HpcrlError(f"a process that wrote it {how_it_ended(-number, memory)}")

    def again() -> None:
        while not over.wait(AGAIN):
            if _child_has_ended() and main.ident is not None:
                signal.pthread_kill(main.ident, signal.SIGCHLD)

    over = threading.Event()
    before = signal.signal(signal.SIGCHLD, look)
    reminder = threading.Thread(target=again, name="killed writers", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        over.set()
        reminder.join(10)
        signal.signal(signal.SIGCHLD, before)


def _child_has_ended() -> bool:
    """Whether a child that has not been waited for has ended."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _killed_by(pid: int) -> int:
    """The signal that killed a child, which its parent can still wait for; 0 if none did, or it lives."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_status if found and found.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0
