"""What is sent: the samples of a rollout batch; and how it is checked that the consumer has read them.

256 samples a batch, lengths lognormal between 2048 and 8192 tokens, 256 of them prompt.  Every transport begins with
the same arrays, one set a sample (ids int32, loss mask uint8, log-probs float32, and for ours policy versions int32),
and ends when the consumer has added up all ids and masks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COMPLETED

SAMPLES = 256
GROUP = 8
PROMPT = 256
DIFFERENT = 4
GO, END = "go", "end"


@dataclass(frozen=True)
class Passes:
    """How much one process pair transports: `warm` passes that are not counted, then `timed` ones, of `batches`
    each."""

    warm: int
    timed: int
    batches: int

    @property
    def total(self) -> int:
        return (self.warm + self.timed) * self.batches


class Control:
    """The line between the two processes of a pair: JSON, one value a line.

    cpu: this process's CPU seconds at each line, said or heard, that begins or ends a pass.
    """

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self.cpu: list[float] = []

    def tell(self, value: Any) -> None:
        if self._file:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()
        self._mark(value)

    def _mark(self, value: Any) -> None:
        if value in (GO, END):
            self.cpu.append(time.process_time())

    def hear(self) -> Any:
        line = self._file.readline()
        if not line:
            raise EOFError("the other process is gone")
        value = json.loads(line)
        self._mark(value)
        return value


def batches() -> list[list[Sample]]:
    """Batches that differ, the same in every process; they are sent in turn, so that no cache holds what is sent
    next."""
    rng = np.random.default_rng(1)
    return [[_sample(rng, number) for number in range(SAMPLES)] for _ in range(DIFFERENT)]


def _sample(rng: np.random.Generator, number: int) -> Sample:
    length = int(np.clip(rng.lognormal(np.log(4096), 0.5), 2048, 8192))
    answer = length - PROMPT
    return Sample(
        group_index=number // GROUP,
        response_index=number % GROUP,
        tokens=rng.integers(0, 150_000, length, dtype=np.int32),
        response_length=answer,
        loss_mask=np.ones(answer, np.uint8),
        rollout_log_probs=-rng.random(answer, dtype=np.float32),
        versions=np.full(answer, 7, np.int32),
        reward=1.0,
        status=COMPLETED,
    )


def groups(batch: list[Sample]) -> list[list[Sample]]:
    return [batch[at : at + GROUP] for at in range(0, len(batch), GROUP)]


def columns(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, masks and log-probs of the samples, each in one array."""
    return tuple(
        np.concatenate([s.array(name) for s in samples]) for name in ("tokens", "loss_mask", "rollout_log_probs")
    )


def facts(samples: list[Sample]) -> dict[str, Any]:
    """What a receiver needs beside the arrays."""
    return {
        "group": [s.group_index for s in samples],
        "lengths": [len(s.array("tokens")) for s in samples],
        "responses": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
    }


def read(ids: np.ndarray, mask: np.ndarray) -> int:
    """Look at every id and every mask."""
    return int(ids.sum()) + int(mask.sum())


def bytes_of(batch: list[Sample]) -> int:
    """Bytes of ids, masks and log-probs."""
    return sum(
        s.array("tokens").nbytes + s.array("loss_mask").nbytes + s.array("rollout_log_probs").nbytes for s in batch
    )


def timed(control: Control, passes: Passes, receive: Callable[[int], int]) -> list[float]:
    """Seconds of each timed pass.  receive(number of the batch) -> what `read` found; it is compared with what was
    sent."""
    expected = [sum(read(s.array("tokens"), s.array("loss_mask")) for s in batch) for batch in batches()]
    seconds, number = [], 0
    for count in range(passes.warm + passes.timed):
        begun = time.perf_counter()
        control.tell(GO)
        for _ in range(passes.batches):
            found = receive(number)
            if found != expected[number % DIFFERENT]:
                raise AssertionError(f"batch {number} was not received as it was sent")
            number += 1
        if count >= passes.warm:
            seconds.append(time.perf_counter() - begun)
    control.tell(END)
    return seconds
