"""Writing a checkpoint's files in the background: a process forked from the trainer rank, and watched by it.

    writer = CheckpointWriter(request)   # what the state is now, whatever training changes of it from here on
    writer.done()                        # now and then
    writer.hand_over()                   # once it is: Megatron learns what was written

A process that is forked from one with threads has none of them: a lock that one of them held at that moment is held for
ever, in whatever library.  So it does as little as it can: it writes, answers, and is gone.

Invariants: it dies with the rank; it starts no process; one that was killed has failed, and all ranks learn of it
together; who waits for one has a deadline.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch

from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.process import die_with_parent
from hpcrl.trainer.checkpoint.writers import private, transforms, write_files
from hpcrl.utils.waiting import Deadline

ENDING: Final = 10.0  #: seconds that a writer which has written may take to end


class CheckpointWriter:
    """A forked process that writes this rank's part of a checkpoint, from memory as it is at the fork."""

    def __init__(self, request: Any) -> None:
        _, buckets, self.results = request.async_fn_args
        if request.preload_fn is not None:
            # GPU tensors into host memory; those on the CPU are shared until one side writes
            buckets = private(request.preload_fn())
        context = multiprocessing.get_context("fork")
        self.mine, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_write, args=(transforms(request), buckets, theirs), daemon=False)
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

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or said what it wrote, but no longer than that."""
        deadline = Deadline(seconds)
        while not self.done() and not deadline.over:  # one that is killed closes its pipe before it has ended
            wait([self.process.sentinel] if self.mine.closed else [self.mine, self.process.sentinel], deadline.left)

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
