"""Groups on disk: RUN/bank/NUMBER.groups, a file for those that were written together.

    length of the index (4 bytes, little-endian) | index: msgpack, [number of the group, bytes of it] each | the groups

A group is msgpack with declared types, the columns of its samples as they lie in memory.  What comes while a file is
being written goes into the next one: an fsync costs about as much for one group as for many.  A group that is written
again stands in two files; the newer counts.  A file is removed with the last group that stands in no newer one.

Invariants: what is read is what was written, bit for bit, and reading runs nothing that the bytes say; a file is whole
or absent (written under another name, flushed, renamed); a group that is damaged, or of another prompt, counts as
absent, and is made again; the maps are changed under their lock, as groups are written in one thread and removed in
another; nothing is being written once everybody who called `keep` has returned or was cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.rollout.async_tasks import in_thread
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.worker_messages import PackedSample, pack, unpack
from hpcrl.run.role import say
from hpcrl.run.rundir import write_atomic
from hpcrl.run.storage_errors import PATIENCE
from hpcrl.utils.untrusted_files import open_regular


class _Group(msgspec.Struct):
    """One group of the bank.

    Attributes:
        prompt: BLAKE2b of its token ids.
        finished, begun: index of a response -> its samples.
    """

    number: int
    prompt: bytes
    finished: dict[int, list[PackedSample]]
    partial: dict[int, list[PackedSample]]
    baseline: float | None


def encode(progress: GroupProgress) -> bytes:
    """A group as bytes.  TypeError and the like for what msgpack does not know."""
    every = lambda several: {index: [pack(sample) for sample in samples] for index, samples in several.items()}  # noqa: E731
    baseline = None if math.isnan(progress.baseline) else progress.baseline
    return msgspec.msgpack.encode(
        _Group(progress.number, _name(progress.group), every(progress.finished), every(progress.partial), baseline)
    )


def decode(data: bytes, group: Group) -> GroupProgress:
    """The group of these bytes.

    Raises:
        HpcrlError: if it is damaged, or of another group or prompt.
    """
    try:
        file = msgspec.msgpack.decode(data, type=_Group)
        if (file.number, file.prompt) != (group.number, _name(group)):
            raise HpcrlError(f"it is of group {file.number} with another prompt")
        every = lambda several: {i: [unpack(sample) for sample in samples] for i, samples in several.items()}  # noqa: E731
        begun = {index: tuple(samples) for index, samples in every(file.partial).items()}
        return GroupProgress(group, every(file.finished), begun, math.nan if file.baseline is None else file.baseline)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise HpcrlError(f"it is damaged: {type(error).__name__}: {error}") from error


def _name(group: Group) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(group.prompt.tokens, "<i4").tobytes(), digest_size=16).digest()


# ---- files

SUFFIX = ".groups"
_LENGTH = struct.Struct("<I")
_Index = list[tuple[int, Annotated[int, msgspec.Meta(ge=0)]]]


class _Place(NamedTuple):
    """Where a group stands.

    Attributes:
        file: its number.
        begin, size: in bytes.
    """

    file: int
    begin: int
    size: int


@dataclass(eq=False)
class _Together:
    """Groups that go into one file.

    Attributes:
        done: it is on disk, or could not be written for the reason `error`.
    """

    groups: list[GroupProgress] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None


class Bank:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[int, _Place] = {}
        self._alive: dict[int, set[int]] = {}  # file -> the groups that stand in no newer one
        self._spent: list[int] = []  # files that are of no use; a reader removes none
        self._next = -1  # number of the next file; -1: not looked up yet
        self._made = False  # whether the folder is known to be there
        self._maps = threading.Lock()
        self._coming = _Together()
        self._writing = asyncio.Lock()
        self._unwritable: set[str] = set()  # said once each

    def path(self, number: int) -> Path:
        """The file in which a group stands.

        Raises:
            KeyError: if it stands in none.
        """
        self._read_index_once()
        return self._file(self._places[number].file)

    def _file(self, file: int) -> Path:
        return self._folder / f"{file:08d}{SUFFIX}"

    def numbers(self) -> list[int]:
        """Of all groups, in order."""
        self._read_index_once()
        return sorted(self._places)

    async def keep(self, progress: GroupProgress) -> None:
        """Have the group on disk, together with what else is to be written just now.  Errors as `write`."""
        mine = self._coming
        mine.groups.append(progress)
        async with self._writing:
            if not mine.done:
                if self._coming is mine:
                    self._coming = _Together()
                await in_thread(lambda: self._settle(mine))
        if mine.error is not None:
            raise mine.error

    def _settle(self, together: _Together) -> None:
        """Write them; everybody whose group it was learns how that ended, also where one of them does not wait any
        more."""
        try:
            self.write(together.groups)
        except Exception as error:  # noqa: BLE001
            together.error = error
        together.done = True

    def write(self, groups: Iterable[GroupProgress]) -> list[int]:
        """Have groups on disk, in one file; the numbers of those that could be written (a custom sampler's metadata may
        be anything).

        Raises:
            HpcrlError: if the disk does not take it.
        """
        packed = {progress.number: data for progress in groups if (data := self._encode(progress)) is not None}
        if not packed:
            return []
        self._read_index_once()
        with self._maps:
            file = self._next
            self._next = self._next + 1
        sizes = [(number, len(data)) for number, data in packed.items()]
        index = msgspec.msgpack.encode(sizes)
        if not self._made:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._made = True
        write_atomic(self._file(file), b"".join((_LENGTH.pack(len(index)), index, *packed.values())), patience=PATIENCE)
        with self._maps:
            self._spent += self._enter(file, len(index), sizes)
        self._sweep()
        return list(packed)

    def _encode(self, progress: GroupProgress) -> bytes | None:
        try:
            return encode(progress)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            if (text := f"{type(error).__name__}: {error}") not in self._unwritable:
                self._unwritable.add(text)
                say(f"group {progress.number} is not kept for a restart: {text}")
            return None

    def read(self, group: Group) -> GroupProgress | None:
        """What is on disk of a group; None if there is nothing, or nothing that can be read."""
        self._read_index_once()
        if (place := self._places.get(group.number)) is None:
            return None
        path = self._file(place.file)
        try:
            with open_regular(path) as file:
                file.seek(place.begin)
                return decode(file.read(place.size), group)
        except FileNotFoundError:
            return None
        except (HpcrlError, OSError) as error:
            say(f"group {group.number} in {path} is left out: {error}")
            return None

    def remove(self, numbers: Collection[int]) -> None:
        """Forget groups, and remove the files that hold no other."""
        self._read_index_once()
        with self._maps:
            self._spent += [file for number in numbers if (file := self._leave(number)) is not None]
        self._sweep()

    def _sweep(self) -> None:
        with self._maps:
            spent = self._spent
            self._spent = []
        for file in spent:
            self._file(file).unlink(missing_ok=True)

    # ---- the maps

    def _read_index_once(self) -> None:
        """Read the files' indexes, once."""
        with self._maps:
            if self._next < 0:
                self._read_indexes()

    def _read_indexes(self) -> None:
        paths = {int(path.stem): path for path in self._folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()}
        self._next = max(paths, default=-1) + 1
        for file, path in sorted(paths.items()):
            try:
                with open_regular(path) as data:
                    (length,) = _LENGTH.unpack(data.read(_LENGTH.size))
                    index = msgspec.msgpack.decode(data.read(length), type=_Index)
            except (OSError, struct.error, msgspec.MsgspecError) as error:
                say(f"{path} is left out: it is damaged: {error}")
                index = []
            self._spent += self._enter(file, length, index) if index else [file]

    def _enter(self, file: int, index: int, sizes: list[tuple[int, int]]) -> list[int]:
        """Groups stand in `file` now, behind an index of so many bytes; the files that are of no use any more."""
        begins = accumulate((size for _, size in sizes), initial=_LENGTH.size + index)
        spent = [old for number, _ in sizes if (old := self._leave(number)) is not None]
        self._places |= {
            number: _Place(file, begin, size) for (number, size), begin in zip(sizes, begins, strict=False)
        }
        self._alive[file] = {number for number, _ in sizes}
        return spent

    def _leave(self, number: int) -> int | None:
        """A group stands nowhere any more; its file, if that was its last."""
        if (place := self._places.pop(number, None)) is None:
            return None
        alive = self._alive[place.file]
        alive.discard(number)
        if alive:
            return None
        del self._alive[place.file]
        return place.file
