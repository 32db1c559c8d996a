"""Whether a checkpoint is whole, and from which one a run resumes: the newest that is.

A checkpoint is damaged if a file that was written is missing or has another size, or if a file without tensors fails
its checksum in hpcrl.json.  With --verify-checkpoint every rank also reads a share of the tensors and compares each
piece with the checksum that torch wrote.  A run then looks at the checkpoint before a damaged one, of the same run,
unless the user has named this one (`hpcrl resume RUN --ckpt-step N`).

Invariants: nothing is loaded before this comparison; all ranks come to the same answer; what a host could not read for
reasons of its own (a network file system that does not answer, no more memory) is an error and never damage; nothing is
removed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.files.torch_dist import MOST_METADATA, TorchDist, latest, step
from hpcrl.run.rundir import CHOSEN, TRACKER
from hpcrl.trainer.collectives import agree, broadcast_json
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.utils.untrusted_files import Damaged, count_of, open_regular, read_given_bytes, read_json

RECORD = "hpcrl.json"
PIECE = 1 << 22  #: bytes of one read
PIECES = ".distcp"  #: files whose pieces have a checksum each


class CheckpointRecord(msgspec.Struct, frozen=True):
    """hpcrl.json of a checkpoint that a run of ours saved.

    Attributes:
        files: of the other files the size, and the CRC-32 of those that are not PIECES.
    """

    run_id: str
    rollout_id: int
    version: int
    data: dict[str, Any] | None
    files: dict[str, tuple[int, int | None]]


@dataclass(frozen=True)
class WholeCheckpoint:
    """A whole checkpoint to resume from.

    Attributes:
        passed: what is wrong with those that were passed over for it, the newest first.
    """

    path: Path
    record: CheckpointRecord
    passed: tuple[str, ...] = ()


def choose(
    path: Path, older: Callable[[], Sequence[Path]], examine: Callable[[Path], CheckpointRecord]
) -> WholeCheckpoint:
    """The first whole one of `path` and the `older` ones, which are asked for only if it is damaged.

    Args:
        examine: DataError if a checkpoint is damaged.

    Raises:
        DataError: what is wrong with `path`, if none is whole.
    """
    try:
        return WholeCheckpoint(path, examine(path))
    except DataError as error:
        first = error
    passed = [first.what]
    for other in (others := older()):
        try:
            return WholeCheckpoint(other, examine(other), tuple(passed))
        except DataError as error:
            passed.append(error.what)
    if others:
        raise DataError(first.what, f"none of the {len(others)} checkpoints before it is whole either") from first
    raise first


def newest_whole(
    path: Path, older: Callable[[], Sequence[Path]], ranks: Ranks, run_id: str | None, verify: bool
) -> WholeCheckpoint:
    """`choose`, with all ranks; collective.

    Args:
        older: called on rank 0.
        run_id: HpcrlError for one that another run saved (None: any may have).
        verify: compare the tensors with their checksums, too.

    Raises:
        DataError: the same on all ranks.
    """

    def others() -> list[Path]:
        names = agree(lambda: [str(other) for other in older()], ranks.rank == 0)
        return [Path(name) for name in broadcast_json(names)]

    return choose(path, others, lambda one: check(one, ranks, run_id, verify))


# ---- one checkpoint


def check(path: Path, ranks: Ranks, run_id: str | None, verify: bool = False) -> CheckpointRecord:
    """The record of a checkpoint that is whole, with all that it holds in addition to the model; collective.

    Raises:
        DataError: the same on all ranks, if it is damaged: names the file, and the checkpoint to resume from instead.
    """
    found = agree(lambda: record_of(path, run_id), ranks.rank == 0)
    record = msgspec.convert(broadcast_json(found), CheckpointRecord)
    names = broadcast_json(agree(lambda: folders(path, record), ranks.rank == 0))
    try:
        for name in names:
            stored = open_stored(path / name, ranks)
            if verify:
                agree(lambda stored=stored: stored.check_sums(ranks.rank, dist.get_world_size()))
        agree(lambda: check_files(path, record.files), ranks.rank == 0)
    except DataError as error:
        raise DataError(error.what, instead(path) or error.hint) from error
    return record


def open_stored(path: Path, ranks: Ranks) -> TorchDist:
    """A checkpoint of ours; rank 0 has seen that all of its files have their sizes; collective.

    Raises:
        DataError: the same on all ranks, names the file.
    """
    return agree(lambda: TorchDist(path, whole=ranks.rank == 0))


def instead(path: Path) -> str:
    """How to resume from the checkpoint before one that is damaged; "" if there is none."""
    before = sorted(other for other in path.parent.glob("iter_*") if other.name < path.name)
    return f"resume from the one before: hpcrl resume RUN --ckpt-step {int(before[-1].name[5:])}" if before else ""


def record_of(path: Path, run_id: str | None) -> CheckpointRecord:
    """hpcrl.json of a checkpoint that a run of ours saved.

    Raises:
        DataError: if it is damaged; HpcrlError if it is of another run than `run_id`.
    """
    try:
        record = read_json(path / RECORD, CheckpointRecord, most=MOST_METADATA)
    except (FileNotFoundError, NotADirectoryError, Damaged) as error:
        raise DataError(
            f"{path / RECORD} cannot be read: {error}", instead(path) or "--load starts from the weights alone"
        ) from error
    if run_id not in (None, record.run_id):
        raise HpcrlError(
            f"{path} was saved by another run", "give --save another directory; --load starts from its weights"
        )
    return record


def saved_by(path: Path) -> str | None:
    """The run that saved a checkpoint; None if it was no run of hpcrl.

    Raises:
        DataError: if its record is damaged.
    """
    return record_of(path, None).run_id if (path / RECORD).is_file() else None


def folders(path: Path, record: CheckpointRecord) -> list[str]:
    """The torch_dist checkpoints that one holds: itself, and of further models or sets of weights."""
    named = {str(Path(name).parent) for name in record.files if Path(name).name == ".metadata"}
    return sorted({".", *named, *(found.parent.name for found in path.glob("*/.metadata"))})


def manifest(path: Path, pieces: bool = False) -> dict[str, tuple[int, int | None]]:
    """`CheckpointRecord.files` of what is in a directory.

    Args:
        pieces: with the checksums of PIECES.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != RECORD)
    sums = (None if file.suffix == PIECES and not pieces else checksum(file) for file in files)
    return {str(file.relative_to(path)): (file.stat().st_size, found) for file, found in zip(files, sums, strict=True)}


def check_files(path: Path, files: Mapping[str, tuple[int, int | None]]) -> None:
    """Raise DataError unless every file of a `manifest` is there as it was written."""
    for name, (size, wanted) in files.items():
        if not is_inside(name):
            raise DataError(f"{path / RECORD} is damaged: it names {name!r}")
        file = path / name
        if not file.is_file():
            raise DataError(f"{file} is missing", "the checkpoint is not complete")
        if (found := file.stat().st_size) != size:
            raise DataError(f"{file} is damaged: {found} bytes, {size} were written")
        if wanted is not None and checksum(file) != wanted:
            raise DataError(f"{file} is damaged: it fails its checksum", "the disk has changed it since it was written")


def is_inside(name: str) -> bool:
    """Whether a file's name leads to no other directory."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def read_pieces(file: Path) -> Iterator[bytes]:
    """What is in a file, PIECE bytes at a time."""
    with open_regular(file) as stream:
        while piece := stream.read(PIECE):
            yield piece


def checksum(file: Path) -> int:
    """The CRC-32 of a file."""
    return reduce(lambda found, piece: zlib.crc32(piece, found), read_pieces(file), 0)


# ---- which there are


def number_of(path: Path) -> int | None:
    """The rollouts of a checkpoint by its name; None for a directory that is not a checkpoint."""
    return count_of(path.name.removeprefix("iter_")) if path.name.startswith("iter_") else None


def of_this_run(path: Path, run_id: str) -> bool:
    """Whether run `run_id` saved a checkpoint; where its record is lost or damaged, those before it tell."""
    try:
        owner = saved_by(path)
    except DataError:
        owner = None
    return owner == run_id or (owner is None and bool(older(path, run_id)))


def older(path: Path, run_id: str | None) -> list[Path]:
    """The checkpoints before `path` that a run may resume from, the newest first: those of run `run_id` (None: of any),
    and those whose record is damaged."""
    number = number_of(path)
    return [other for other in of_run(path.parent, run_id) if number is not None and (number_of(other) or 0) < number]


def of_run(directory: Path, run_id: str | None) -> list[Path]:
    """The checkpoints of run `run_id` (None: of any), and those whose record is damaged; the newest first.

    None if only such are there.
    """
    found = []
    sure = False
    for path in sorted(directory.glob("iter_*"), key=lambda one: number_of(one) or 0, reverse=True):
        if number_of(path) is None or not path.is_dir():
            continue
        try:
            owner = saved_by(path)
        except DataError:
            found.append(path)
            continue
        if owner is not None and run_id in (None, owner):
            found.append(path)
            sure = True
    return found if sure else []


def named(directory: Path, run_id: str) -> tuple[Path | None, str]:
    """The checkpoint that the user or the tracker names, or the newest of this run where the tracker is lost; and what
    is wrong with the tracker, "" if nothing is.

    Raises:
        HpcrlError: if it names a checkpoint that is not there, and the run has no other.
    """
    own = lambda: of_run(directory, run_id)  # noqa: E731
    chosen = chosen_by_user(directory)
    try:
        path = latest(directory)
    except HpcrlError as error:
        if chosen is None and (found := own()):
            return found[0], error.what
        raise
    if path is not None:
        return path, ""
    if chosen is not None:
        return step(directory, chosen), ""
    return (found[0], f"{directory / TRACKER} is missing") if (found := own()) else (None, "")


def chosen_by_user(directory: Path) -> int | None:
    """The number that --ckpt-step has given, if nothing was saved since."""
    try:
        return count_of(read_given_bytes(directory / CHOSEN).decode(errors="replace").strip())
    except FileNotFoundError:
        return None
