"""Rollouts in files, to be trained from again: --save-debug-rollout-data and --load-debug-rollout-data.

    magic, number of frames, length of each (little-endian), then the frames: a share of the queue that holds the whole rollout
    (`queue/share_format.py`), and what the trainer does not need of each sample, as msgpack

Invariants: what is read is what was written, bit for bit, so training from it gives the same losses; nothing is unpickled, and
whatever a file holds, `read_rollout` returns whole samples or raises DataError and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.queue.share_format import Share, WireError, decode, encode
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampler import GREEDY, Asked
from hpcrl.run.rundir import write_atomic
from hpcrl.sample import STATUSES, Sample, SampleBatch

MAGIC = b"HPCRLRO1"
LARGEST = 1 << 37  #: bytes of a file that is read
FRAMES = 64  #: at most
_HEAD = struct.Struct("<8sI")
_SIZE = struct.Struct("<Q")


class Words(msgspec.Struct, forbid_unknown_fields=True):
    """What a sample has beside the columns of its share."""

    prompt: Any = None
    response: str = ""
    label: Any = None
    metadata: dict[str, Any] = {}
    rewards: dict[str, float] = {}
    grading: str = ""
    grading_error: str = ""


class SavedRollout(NamedTuple):
    """The samples of one rollout, by group and index, meant for policy `version`."""

    rollout_id: int
    version: int
    samples: list[Sample]


def file_of(template: str, rollout_id: int) -> Path:
    """The file of a rollout."""
    return Path(template.format(rollout_id=rollout_id))


# ---- one file


def write_rollout(path: Path, rollout_id: int, version: int, samples: Sequence[Sample]) -> None:
    """Write the file, whole.  HpcrlError if the disk does not take it."""
    batch = SampleBatch.of(list(samples))
    whole = Share(rollout_id, version, batch, [[list(range(len(batch)))]], [len(batch)], [int(batch.loss_mask.sum())])
    words = [Words(*(getattr(sample, name) for name in Words.__struct_fields__)) for sample in samples]
    frames = [*map(bytes, encode(whole)), msgspec.msgpack.encode(words)]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    head = _HEAD.pack(MAGIC, len(frames)) + b"".join(_SIZE.pack(len(frame)) for frame in frames)
    write_atomic(path, b"".join([head, *frames]))


def read_rollout(path: Path) -> SavedRollout:
    """The rollout in a file.  DataError if it is not there, or is not what `write_rollout` writes."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} has more than {LARGEST >> 30} GiB", "is this a file of --save-debug-rollout-data?")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"--load-debug-rollout-data {path}: {error.strerror}") from error
    try:
        *frames, words = _frames(memoryview(data))
        share = decode(frames)
        every = msgspec.msgpack.decode(words, type=list[Words])
        if len(every) != len(share.batch) or not np.array_equal(share.own, np.arange(len(share.table))):
            raise ValueError(f"{len(every)} samples in words, {len(share.batch)} in columns, of {len(share.table)}")
        samples = [_sample(share.batch.take([number]), words) for number, words in enumerate(every)]
    except (WireError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        what = error.what if isinstance(error, WireError) else str(error)
        raise DataError(f"{path} is damaged, or no file of --save-debug-rollout-data: {what}") from error
    return SavedRollout(share.rollout_id, share.version, samples)


def _frames(data: memoryview) -> list[memoryview]:
    """The frames, which must fill the file.  ValueError otherwise."""
    if len(data) < _HEAD.size:
        raise ValueError("it is too short")
    magic, count = _HEAD.unpack_from(data)
    if magic != MAGIC or not 2 <= count <= FRAMES or len(data) < _HEAD.size + count * _SIZE.size:
        raise ValueError("it does not begin as one")
    sizes = [_SIZE.unpack_from(data, _HEAD.size + number * _SIZE.size)[0] for number in range(count)]
    at = _HEAD.size + count * _SIZE.size
    if at + sum(sizes) != len(data):
        raise ValueError(f"it has {len(data)} bytes, its head declares {at + sum(sizes)}")
    found = []
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found


def _sample(one: SampleBatch, words: Words) -> Sample:
    """The only sample of a batch."""
    row = one.rows[0]
    return Sample(
        group=int(row["group"]),
        index=int(row["index"]),
        tokens=one.tokens,
        response_length=int(row["response_length"]),
        loss_mask=one.loss_mask,
        logprobs=one.logprobs,
        versions=one.versions,
        reward=float(row["reward"]),
        baseline=float(row["baseline"]),
        status=STATUSES[int(row["status"])],
        extra=one.extra,
        **msgspec.structs.asdict(words),
    )


# ---- a run from files


class SavedRollouts:
    """In place of prompts and engines: a source whose groups, and a sampler whose samples, come from files.

    Rollout k of the run is the file of rollout k.  A policy version in it counts as it was when the file was written, reckoned from
    the version that the rollout was meant for.
    """

    def __init__(self, options: Options) -> None:
        """DataError unless the first file can be read and fits the options."""
        assert options.load_debug_rollout_data is not None
        self.template, self.total = options.load_debug_rollout_data, options.num_rollout or 0
        self._groups, self._each = options.rollout_batch_size, options.n_samples_per_prompt
        self._next = 0  # the file that is read next
        self._waiting: deque[Group] = deque()
        self._samples: dict[tuple[int, int], list[Sample]] = {}
        self._version = 0
        self._load(0)
        self._forget()

    def __str__(self) -> str:
        return f"{self.total} rollouts from {self.template}"

    def _load(self, rollout_id: int) -> None:
        path = file_of(self.template, rollout_id)
        found = read_rollout(path)
        self._version, self._samples = found.version, {}
        for sample in found.samples:
            self._samples.setdefault((sample.group, sample.index), []).append(sample)
        numbers = sorted({group for group, _ in self._samples})
        wanted = {(number, index) for number in numbers for index in range(self._each)}
        if len(numbers) != self._groups or set(self._samples) != wanted:
            each = sorted({sum(group == number for group, _ in self._samples) for number in numbers})
            raise DataError(
                f"{path} holds {len(numbers)} groups of {' or '.join(map(str, each))}, the options ask for {self._groups} of {self._each}",
                "give --rollout-batch-size and --n-samples-per-prompt as they were",
            )
        self._waiting.extend(Group(number, None) for number in numbers)  # type: ignore[arg-type]  (nothing is asked of it)

    def _forget(self) -> None:
        self._waiting.clear()
        self._samples = {}

    # ---- as a source

    def take(self, count: int) -> list[Group]:
        """The next `count` groups.  DataError if a file is missing or damaged."""
        taken: list[Group] = []
        while len(taken) < count:
            if not self._waiting:
                self._load(self._next)
                self._next += 1
            taken.append(self._waiting.popleft())
        return taken

    def state(self) -> dict[str, Any]:
        """Which file is next, as plain JSON."""
        return {"saved_rollout": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.  A state of a run that sampled goes on with the file of the rollout after it."""
        self._forget()
        self._next = int(state.get("saved_rollout", state["rollout_id"] + 1))

    # ---- as a sampler

    async def make(self, asked: Asked) -> list[Sample]:
        """The samples of one response as they were saved."""
        if asked.index == GREEDY:
            return [self._greedy(asked)]
        found = self._samples[asked.group.number, asked.index]
        later = asked.version - self._version
        return [replace(sample, versions=sample.versions + np.int32(later)) for sample in found]

    def _greedy(self, asked: Asked) -> Sample:
        """A sample whose reward is the greedy response's.  DataError if none was saved."""
        sample = self._samples[asked.group.number, 0][0]
        if math.isnan(sample.baseline):
            raise DataError(
                f"{self.template}: group {sample.group} has no greedy response, which the estimator needs",
                "save the rollouts with the same --advantage-estimator",
            )
        return replace(sample, index=GREEDY, reward=sample.baseline)
