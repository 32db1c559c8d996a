"""A rank's part of a copy in memory, as files of this host, and its way to the host of its partner.

    COPIES/7/rank-00003/   __3_0.distcp ...     what rank 3 wrote of the state after 7 rollouts
                           index.json           `Part`: written last, so that a part with one is whole

Invariants: a part without its index does not count; what arrives is compared with the checksums that its writer has
computed; what travels are bytes, and file names without a way out of the part's directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from hpcrl.errors import DataError, HpcrlError
from hpcrl.run.rundir import listed, write_unread
from hpcrl.run.storage_errors import describe
from hpcrl.trainer.checkpoint.copies_plan import Part
from hpcrl.trainer.checkpoint.whole import PIECE, check_files, is_inside, read_pieces
from hpcrl.utils.untrusted_files import Damaged, count_of, read_json

INDEX = "index.json"
SLOWEST = timedelta(minutes=10)  #: for one of them, on its way between two hosts


def part_directory(copies: Path, rollout_id: int, rank: int) -> Path:
    """Where the part of a rank is."""
    return copies / str(rollout_id) / f"rank-{rank:05d}"


def remove_other(copies: Path, rank: int, rollout_id: int) -> None:
    """Remove a rank's parts of all rollouts except `rollout_id`; what cannot be removed stays."""
    for name in listed(copies):
        if (number := count_of(name)) is not None and number != rollout_id:
            remove_part(copies, number, rank)


def remove_part(copies: Path, rollout_id: int, rank: int) -> None:
    """Remove one part, and the directory of its step with the last."""
    shutil.rmtree(part_directory(copies, rollout_id, rank), ignore_errors=True)
    with contextlib.suppress(OSError):
        (copies / str(rollout_id)).rmdir()


def clear(copies: Path) -> None:
    """Remove every copy: what is newer than where an attempt begins is of a history that is no more."""
    for name in listed(copies):
        if count_of(name) is not None:
            shutil.rmtree(copies / name, ignore_errors=True)


def write_index(directory: Path, part: Part) -> None:
    """Say that a part is whole."""
    write_unread(directory / ".index", msgspec.json.encode(part))
    os.rename(directory / ".index", directory / INDEX)


def parts_here(copies: Path, run_id: str, after: int) -> Iterator[tuple[Path, Part]]:
    """The parts of the run that are here, of more rollouts than `after`, in the order of their names."""
    for name in sorted(listed(copies)):
        if (number := count_of(name)) is None or number <= after:
            continue
        for rank in sorted(listed(copies / name)):
            with contextlib.suppress(OSError, Damaged):
                part = read_json(copies / name / rank / INDEX, Part)
                if part.run_id == run_id and copies / name / rank == part_directory(copies, number, part.rank):
                    yield copies / name / rank, part


def is_whole(directory: Path, part: Part) -> bool:
    """Whether every file of a part is as it was written."""
    try:
        check_files(directory, part.files)
    except (DataError, OSError):
        return False
    return True


def copy_part(directory: Path, part: Part, target: Path, without: tuple[str, ...] = ()) -> None:
    """Copy the files of a part, and have them on disk.

    Raises:
        HpcrlError: with what the system said.
    """
    for name in part.files:
        if name in without:
            continue
        file = target / name
        try:
            file.parent.mkdir(exist_ok=True)
            _write(file, read_pieces(directory / name), flushed=True)
        except OSError as error:
            raise HpcrlError(f"cannot write {file}: {describe(error, file)}") from error


def _write(file: Path, pieces: Iterator[bytes], flushed: bool = False) -> int:
    """Write a file that is not there; its CRC-32."""
    found = 0
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as stream:
        for piece in pieces:
            stream.write(piece)
            found = zlib.crc32(piece, found)
        if flushed:
            stream.flush()
            os.fsync(stream.fileno())
    return found


# ---- between hosts


def send_part(directory: Path, part: Part, target: int, group: dist.ProcessGroup) -> None:
    """Send a part to rank `target`."""
    head = msgspec.json.encode(part)
    _send(torch.tensor([len(head)]), target, group)
    _send(torch.frombuffer(bytearray(head), dtype=torch.uint8), target, group)
    for name in part.files:
        for piece in read_pieces(directory / name):
            _send(torch.frombuffer(bytearray(piece), dtype=torch.uint8), target, group)


def receive_part(copies: Path, source: int, group: dist.ProcessGroup) -> None:
    """Write down the part that rank `source` sends.

    Raises:
        HpcrlError: if it is not what its writer has summed up.
    """
    size = torch.zeros(1, dtype=torch.int64)
    _receive(size, source, group)
    head = torch.empty(int(size), dtype=torch.uint8)
    _receive(head, source, group)
    part = msgspec.json.decode(head.numpy().tobytes(), type=Part)
    directory = part_directory(copies, part.rollout_id, part.rank)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    for name, (length, wanted) in part.files.items():
        if not is_inside(name):
            raise HpcrlError(f"rank {source} sent a file of the name {name!r}")
        (directory / name).parent.mkdir(exist_ok=True)
        if _write(directory / name, _arriving(length, source, group)) != wanted:
            raise HpcrlError(f"{name} of rank {source} arrived with another checksum")
    write_index(directory, part)


def _arriving(length: int, source: int, group: dist.ProcessGroup) -> Iterator[bytes]:
    while length > 0:
        piece = torch.empty(min(length, PIECE), dtype=torch.uint8)
        _receive(piece, source, group)
        length -= len(piece)
        yield memoryview(piece.numpy())  # type: ignore[misc]


def _send(tensor: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
    group.send([tensor], dist.get_group_rank(group, target), 0).wait(SLOWEST)


def _receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    group.recv([tensor], dist.get_group_rank(group, source), 0).wait(SLOWEST)
