"""Rollouts that were made ahead, on disk: RUN/ahead/ROLLOUT.made.  With --loop async and --deterministic-mode.

A rollout that is made while the one before is trained on has samples of the weights before that training.  A run that
resumes from a checkpoint has only the weights after it, so it could not make the same again: it takes the samples from
here.

Invariants: a file is whole or absent, and on disk before the rollout is handed over; what is read is what was written,
bit for bit; reading one runs nothing that it says; there are no more files than a restart can ask for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.generation.custom_generator import CustomGenerator
from hpcrl.rollout.generation.generator import GeneratedRollout, RolloutGenerator
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.ledger.ledger import HandedOver
from hpcrl.rollout.worker_messages import PackedSample, pack, unpack
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.utils.untrusted_files import SAMPLES, read_regular

FOLDER, SUFFIX = "ahead", ".made"


class _File(msgspec.Struct):
    """What the file of a rollout that was sampled ahead holds besides it.

    Attributes:
        following: groups issued before it.
        version: that sampled it.
        consumed: of the trainer that learns from it.
        source: the state of the source after it.
    """

    following: int
    version: int
    consumed: int
    line: HandedOver
    source: dict[str, Any]
    samples: list[PackedSample]
    dropped: list[PackedSample]
    metrics: dict[str, float]


class GeneratedAhead:
    """A generator whose rollouts are kept until no checkpoint can need them."""

    def __init__(
        self, options: Options, store: GroupStore, rundir: RunDir, generator: RolloutGenerator | CustomGenerator
    ) -> None:
        self._options = options
        self._store = store
        self._generator = generator
        self._folder = rundir.root / FOLDER
        self._first = -1  # the only rollout that this attempt may find made
        self._consumed: dict[int, int] = {}  # of the files of this attempt

    def __str__(self) -> str:
        return str(self._generator)

    def path(self, rollout_id: int) -> Path:
        return self._folder / f"{rollout_id:08d}{SUFFIX}"

    def start_run(self, rollout_id: int) -> None:
        """The run begins, or resumes, at `rollout_id`: files of others are of a history that is no more."""
        self._first = rollout_id
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path != self.path(rollout_id):
                path.unlink(missing_ok=True)

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> GeneratedRollout:
        """The rollout as an earlier attempt made it, if that is here; else made, and kept.

        Raises:
            HpcrlError: if it cannot be kept.
        """
        consumed = version if consumed is None else consumed
        made = await self._again(rollout_id, version, consumed) if rollout_id == self._first else None
        if made is None:
            following = self._store.ledger.following
            made = await self._generator.make(rollout_id, version, consumed)
            await asyncio.to_thread(self._write, rollout_id, following, consumed, made, self._store.state(rollout_id))
        self._consumed[rollout_id] = consumed
        return made

    async def _again(self, rollout_id: int, version: int, consumed: int) -> GeneratedRollout | None:
        path = self.path(rollout_id)
        try:
            found = msgspec.msgpack.decode(read_regular(path, SAMPLES), type=_File)
            samples, dropped = ([unpack(sample) for sample in packed] for packed in (found.samples, found.dropped))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            say(f"{path} is ignored, and its rollout is made again with other weights: {error}")
            return None
        if (found.following, found.consumed) != (self._store.ledger.following, consumed):
            say(f"{path} is ignored: it belongs to another history than the checkpoint")
            return None
        groups = await self._store.replay(found.line, version, found.source)
        rollout = Rollout(rollout_id, found.version, groups, self._options.n_samples_per_prompt)
        responses: dict[tuple[int, int], list[Any]] = {}
        for sample in samples:
            responses.setdefault((sample.group_index, sample.response_index), []).append(sample)
        for response in responses.values():
            rollout.add(response)
        say(
            f"rollout {rollout_id} is taken from {path}: it was made with the weights of policy version {found.version}"
        )
        return GeneratedRollout(rollout, found.metrics, dropped, found.line)

    def _write(
        self, rollout_id: int, following: int, consumed: int, made: GeneratedRollout, source: dict[str, Any]
    ) -> None:
        samples = [pack(sample) for sample in made.rollout.samples()]
        dropped = [pack(sample) for sample in made.dropped]
        file = _File(following, made.rollout.version, consumed, made.line, source, samples, dropped, made.metrics)
        try:
            data = msgspec.msgpack.encode(file)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise HpcrlError(
                f"rollout {rollout_id} cannot be kept for a restart: {type(error).__name__}: {error}",
                "use only plain values in samples, or leave out --deterministic-mode",
            ) from error
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.path(rollout_id), data)

    def prune(self, trained: int, saved: int) -> None:
        """Remove what no restart can ask for: the trainer has learned from `trained`.

        A checkpoint asks for the rollout whose trainer is at its version. One that is to come asks for what is not
        trained yet.

        Args:
            saved: the policy version of its newest checkpoint.
        """
        for path in self._folder.glob(f"*{SUFFIX}"):
            number = int(path.stem) if path.stem.isdecimal() else -1
            checkpoints = self._options.save_interval or self._options.non_persistent_save_interval
            checkpointed = bool(checkpoints) and self._consumed.get(number, saved) >= saved
            if number <= trained and not checkpointed:
                path.unlink(missing_ok=True)
