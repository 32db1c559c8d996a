"""Samples in files: RUN/samples to be read, and whole rollouts to be trained on again.

RUN/samples has one JSON object a sample: what was asked, answered and earned.  --save-debug-rollout-data writes, and
--load-debug-rollout-data reads:

    msgpack of a `SavedRollout`, the columns of its samples as they lie in memory

Invariants: a sample file depends on the samples alone (no engine names, and no times but those of commands in
sandboxes), so a repeated step without sandboxes writes the same bytes.  Of a rollout, what is read is what was written,
bit for bit, so training on it gives the same losses; nothing is unpickled, and whatever a file holds, `read_rollout`
returns whole samples or raises DataError and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import DataError
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest
from hpcrl.rollout.worker_messages import PackedSample, pack, unpack
from hpcrl.run.rundir import write_atomic
from hpcrl.run.storage_errors import PATIENCE
from hpcrl.sample import FIELDS, Sample
from hpcrl.utils.untrusted_files import SAMPLES, read_given_bytes


class SavedRollout(msgspec.Struct):
    """The samples of one rollout, by group and index, meant for policy `version`."""

    rollout_id: int
    version: int
    packed: list[PackedSample]


def file_of(template: str, rollout_id: int) -> Path:
    """The file of a rollout."""
    return Path(template.format(rollout_id=rollout_id))


# ---- one file


def write_rollout(path: Path, rollout_id: int, version: int, samples: Sequence[Sample]) -> None:
    """Write the file, whole.

    Raises:
        HpcrlError: if the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, msgspec.msgpack.encode(SavedRollout(rollout_id, version, [pack(sample) for sample in samples])))


def read_rollout(path: Path) -> tuple[int, list[Sample]]:
    """(policy version, samples) of the rollout in a file.

    Raises:
        DataError: if it is not there, or is not what `write_rollout` writes.
    """
    try:
        data = read_given_bytes(path, SAMPLES)
    except OSError as error:
        raise DataError(
            f"--load-debug-rollout-data {path}: {error.strerror}", "is this a file of --save-debug-rollout-data?"
        ) from error
    try:
        saved = msgspec.msgpack.decode(data, type=SavedRollout)
        samples = [unpack(packed) for packed in saved.packed]
        for sample in samples:
            sample.check()
    except (DataError, ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} is damaged, or no file of --save-debug-rollout-data: {error}") from error
    return saved.version, samples


# ---- a run from files


class SavedRollouts:
    """In place of prompts and engines: a source whose groups, and a sampler whose samples, come from files.

    Rollout k of the run is the file of rollout k; its groups are numbered on through the run, in the order that they
    had.  A policy version counts as it did, reckoned from the version that the rollout was meant for.
    """

    def __init__(self, options: Options) -> None:
        """Raise DataError unless the first file can be read and fits the options."""
        assert options.load_debug_rollout_data is not None
        self.template = options.load_debug_rollout_data
        self.total = options.num_rollout or 0
        self._groups = options.rollout_batch_size
        self._each = options.n_samples_per_prompt
        self._next = 0  # the number of the group that is handed out next
        self._read: dict[
            int, tuple[int, list[list[Sample]]]
        ] = {}  # rollout -> version, samples of each response in order
        self._responses(0)

    def __str__(self) -> str:
        return f"{self.total} rollouts from {self.template}"

    def metrics(self) -> dict[str, float]:
        """What is logged of the source: nothing, the files are not gone through again."""
        return {}

    def _responses(self, rollout_id: int) -> tuple[int, list[list[Sample]]]:
        """(policy version, the samples of each response by group and index) of a file.

        Raises:
            DataError: if it does not fit.
        """
        if rollout_id not in self._read:
            path = file_of(self.template, rollout_id)
            version, found = read_rollout(path)
            by_key: dict[tuple[int, int], list[Sample]] = {}
            for sample in found:
                by_key.setdefault((sample.group_index, sample.response_index), []).append(sample)
            groups = sorted({group for group, _ in by_key})
            if len(groups) != self._groups or set(by_key) != {
                (group, i) for group in groups for i in range(self._each)
            }:
                each = sorted({sum(number == group for number, _ in by_key) for group in groups})
                raise DataError(
                    f"{path} holds {len(groups)} groups of {' or '.join(map(str, each))}, "
                    f"the options ask for {self._groups} of {self._each}",
                    "give --rollout-batch-size and --n-samples-per-prompt as they were",
                )
            self._read = {number: read for number, read in self._read.items() if number == rollout_id - 1}
            self._read[rollout_id] = version, [by_key[key] for key in sorted(by_key)]
        return self._read[rollout_id]

    def _response(self, number: int, index: int) -> tuple[int, list[Sample]]:
        """(policy version, samples) of a response of group `number`."""
        rollout_id, place = divmod(number, self._groups)
        version, responses = self._responses(rollout_id)
        return version, responses[place * self._each + index]

    # ---- as a source

    def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups.

        Raises:
            DataError: if a file is missing or damaged.
        """
        taken = self.again(range(self._next, self._next + count))
        self._next += count
        return taken

    def again(self, numbers: Sequence[int]) -> list[Group]:
        """The groups that have these numbers, by number."""
        for number in numbers:
            self._response(number, 0)
        return [Group(number, None) for number in sorted(numbers)]  # type: ignore[arg-type]  (nothing is asked of the prompt)

    def state(self, alive: Collection[int] | None = None) -> dict[str, Any]:
        """Which group is next, as plain JSON."""
        return {"next_group": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the file after the rollout that `state` was taken after, in a run that sampled too."""
        self._next = (int(state["rollout_id"]) + 1) * self._groups

    # ---- as a sampler

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        """The samples of one response as they were saved."""
        if asked.index == GREEDY:
            return [self._greedy(asked)]
        version, found = self._response(asked.group.number, asked.index)
        later = np.int32(asked.version - version)
        number = asked.group.number
        return [sample.replace(group_index=number, versions=sample.array("versions") + later) for sample in found]

    def _greedy(self, asked: ResponseRequest) -> Sample:
        """A sample whose reward is the greedy response's.

        Raises:
            DataError: if none was saved.
        """
        sample = self._response(asked.group.number, 0)[1][0]
        if math.isnan(sample.baseline):
            raise DataError(
                f"{self.template}: group {sample.group_index} has no greedy response, which the estimator needs",
                "save the rollouts with the same --advantage-estimator",
            )
        return sample.replace(group_index=asked.group.number, response_index=GREEDY, reward=sample.baseline)


# ---- RUN/samples


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write the file, whole.

    Raises:
        HpcrlError: if the disk does not take it.
    """
    write_atomic(path, b"".join(msgspec.json.encode(_record(sample)) + b"\n" for sample in samples), patience=PATIENCE)


#: fields of `Sample` that RUN/samples always shows, or under another name
SHOWN = {"group_index", "response_index", "group_size", "response_length", "prompt", "response", "label", "reward"}
SHOWN |= {"reward_key", "status", "metadata", "baseline"}
RENAMED = {"remove_sample": "removed"}


def _record(sample: Sample) -> dict[str, object]:
    """versions: the policy versions that its tokens were sampled under, each once; baseline: where one was asked for;
    all other fields of a sample where they hold anything."""
    more = {RENAMED.get(name, name): getattr(sample, name) for name in FIELDS if name not in SHOWN}
    more["attributes"] = sample.attributes()
    baseline = {} if math.isnan(sample.baseline) else {"baseline": sample.baseline}
    return {
        "group": sample.group_index,
        "index": sample.response_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.score,
        **baseline,
        "prompt_len": sample.prompt_length,
        "response_len": sample.response_length,
        "status": sample.status,
        "versions": np.unique(sample.array("versions")).tolist(),
        "metadata": sample.metadata,
        **{name: value for name, value in more.items() if value},
    }
