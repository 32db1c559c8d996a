"""Writing a checkpoint's files in the background: a process forked from the trainer rank, and watched by it.

    writer = CheckpointWriter(request)   # what the state is now, whatever training changes of it from here on
    writer.done()                        # now and then
    writer.hand_over()                   # once it is: Megatron learns what was written

A process that is forked from one with threads has none of them: a lock that one of them held at that moment is held for
ever, in whatever library.  So it does as little as it can: it writes, answers, and is gone.

Invariants: it dies with the rank; it starts no process; one that was killed, or whose threads all wait for locks for
PATIENCE seconds, has failed, and all ranks learn of it together.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch

from hpcrl.errors import HpcrlError
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.process import die_with_parent
from hpcrl.trainer.checkpoint.writers import private, transforms, write_files
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.liveness import LastSign

ENDING: Final = 10.0  #: seconds that a writer which has written may take to end
LOOK: Final = 1.0  #: seconds between two looks whether a writer stands still
PATIENCE = 30.0  #: seconds after which one whose threads all wait for locks does
LOOKS: Final = 5  #: and looks that it takes: a job that was suspended for an hour has not stood still for one


class Activity:
    """Whether a process does anything but wait for locks; waiting for a disk, however long, is doing something.

    Args:
        process: its directory in /proc.
        patience: seconds after which one that does not has ceased to.
    """

    def __init__(self, process: Path, patience: float) -> None:
        self.patience = patience
        self._process = process
        self._last = LastSign()
        self._looked = LastSign()
        self._seen: object = None
        self._alike = 0

    def ceased(self) -> bool:
        """Whether it has done nothing for so long; looks once in a while only."""
        if not self._looked.due(LOOK):
            return False
        seen = self._spent()
        self._alike += 1
        if seen is None or seen != self._seen:
            self._seen = seen
            self._alike = 0
            self._last.heard()
        return self._last.silence > self.patience and self._alike >= LOOKS

    def _spent(self) -> list[tuple[str, str]] | None:
        """The processor time of each thread; None: one does not wait for a lock, or the kernel does not tell."""
        try:
            threads = list(self._process.glob("task/*"))
            if not all("futex" in (thread / "wchan").read_text() for thread in threads):
                return None
            stats = ((thread / "stat").read_text().rpartition(")")[2].split() for thread in threads)
            return [(stat[11], stat[12]) for stat in stats]
        except OSError:
            return None


class CheckpointWriter:
    """A forked process that writes this rank's part of a checkpoint, from memory as it is at the fork.

    A process is forked from one with threads, of which it has none: a lock that one of them held is held for ever, in
    whatever library. One that stands still for PATIENCE seconds is therefore ended, and has failed.
    """

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
        self._activity = Activity(Path(f"/proc/{self.process.pid}"), PATIENCE)
        self._stood_still = False
        self._garbled: Exception | None = None

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        if self._heard() or self._garbled is not None or not self.process.is_alive():
            return True
        if self._activity.ceased():
            self._stood_still = True
            self.process.kill()
            self.process.join(ENDING)
        return self._stood_still

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or said what it wrote, but no longer than that."""
        deadline = Deadline(seconds)
        while not self.done() and not deadline.over:
            wait([self.mine, self.process.sentinel], min(deadline.left, LOOK))

    def _heard(self) -> bool:
        """Whether it has said what it wrote."""
        if self.answer is None and self._garbled is None and self.mine.poll():
            try:
                self.answer = self.mine.recv()
            except Exception as error:  # noqa: BLE001  (it died, maybe while it sent this: hand_over says how)
                self._garbled = error
        return self.answer is not None

    def hand_over(self) -> None:
        """Give Megatron what was written, as if this process had.

        Raises:
            HpcrlError: if the writer was killed, or stood still.
        """
        heard = self._heard()
        self.process.join(ENDING)
        if self.process.is_alive():  # it has said what it wrote: what it still does is not needed
            self.process.kill()
            self.process.join(ENDING)
        self.mine.close()
        if not heard and self._stood_still:
            raise HpcrlError(
                f"the process that wrote it waited {self._activity.patience:.0f} s for a lock that nothing releases",
                "it was ended; if that comes again, leave out --async-save",
            )
        if not heard and self.process.exitcode == 0:
            raise HpcrlError(f"the answer of its writer cannot be read: {self._garbled}")
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
