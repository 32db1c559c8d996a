"""Megatron's torch_dist checkpoints as files: what they hold, whether they are whole, and one tensor at a time out of
them.

    stored = TorchDist(directory)                    # reads .metadata
    stored.tensors["decoder.layers.mlp.linear_fc2.weight"].shape    # (layers, rows, columns): of the whole model
    stored.read("decoder.layers.mlp.linear_fc2.weight", (3,))       # layer 3's, (rows, columns)

Nothing here needs torch.distributed, Megatron or a GPU.  `.metadata` is a pickle; it is read as plain values.

Invariants: a file that is missing or too short is named before anything is read from it; whatever the files hold, they
lead to no other file, and what comes of it is a tensor or one DataError.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hpcrl.errors import DataError, HpcrlError
from hpcrl.run.rundir import STALE, TRACKER
from hpcrl.transport.pickles import plain
from hpcrl.transport.pickles.values import Refused
from hpcrl.utils.untrusted_files import count_of, read_given_bytes

#: GLM-4-0414's norms behind a block: as this package's layers have them -> as slime's have, and checkpoints
SANDWICH = {"self_attn_bda.norm.": "post_self_attn_layernorm.", "mlp_bda.norm.": "post_mlp_layernorm."}
Shape = tuple[int, ...]
MOST_METADATA = 1 << 30  #: bytes of .metadata
LONGEST = 200  #: bytes of a directory's name in a tracker file


@dataclass(frozen=True)
class Stored:
    """A tensor of the whole model: its shape and dtype, and (offset, shape) of the pieces that it is stored in."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[tuple[Shape, Shape], ...]


class TorchDist:
    """The tensors of one iter_* or release directory.

    Attributes:
        whole: look at the files too; of many ranks one is enough.

    Raises:
        DataError: if it holds no complete torch_dist checkpoint.
    """

    def __init__(self, path: str | Path, *, whole: bool = True) -> None:
        self.path = Path(path)
        if not (self.path / ".metadata").is_file():
            raise DataError(
                f"{self.path} holds no torch_dist checkpoint: it has no .metadata", "name an iter_* directory"
            )
        try:
            metadata = plain.loads(read_given_bytes(self.path / ".metadata", MOST_METADATA))
            self.where: dict[MetadataIndex, Any] = _places(metadata)
            self.all = _tensors(metadata)
        except Refused as error:
            raise DataError(
                f"{self.path / '.metadata'} is not read: {error.what}",
                "did Megatron-core or torch write it, and which version?",
            ) from error
        except Exception as error:  # whatever unpickling a damaged file gives
            refuse_passing(error)
            raise DataError(f"{self.path / '.metadata'} cannot be read: {type(error).__name__}: {error}") from error
        self._last: tuple[tuple[str, Shape], torch.Tensor] | None = None
        self._names = set(metadata.state_dict_metadata)
        if whole:
            self._check_files()

    def holds(self, name: str) -> bool:
        """Whether it has a tensor or an object of this name."""
        return name in self._names

    @property
    def tensors(self) -> dict[str, Stored]:
        """The model's tensors: neither the optimizer's nor what layers keep in addition to weights."""
        return {key: value for key, value in self.all.items() if "optimizer" not in key and "_state" not in key}

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in self.where.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, size in sorted(needed.items()):
            file = self.path / name
            if not file.is_file():
                raise DataError(f"{file} is missing", "the checkpoint is not complete")
            if file.stat().st_size < size:
                raise DataError(
                    f"{file} is truncated: {file.stat().st_size} bytes, {size} are needed",
                    "the checkpoint is not complete",
                )

    def check_sums(self, part: int = 0, parts: int = 1) -> None:
        """Read every `parts`-th of what is stored, from `part` on, and compare it with the checksums that torch wrote
        next to it.

        Raises:
            DataError: names the file and what is damaged in it. Each piece is a zip archive, as torch.save writes them.
        """
        pieces = sorted(self.where.items(), key=lambda one: (one[1].relative_path, one[1].offset))
        for index, info in pieces[part::parts]:
            with (self.path / info.relative_path).open("rb") as stream:
                view: Any = io.BufferedReader(_Window(stream, info.offset, info.length), 1 << 20)
                _check_archive(view, f"{self.path / info.relative_path} is damaged: {index.fqn}")
        if part == 0 and (common := self.path / "common.pt").is_file():
            with common.open("rb") as stream:
                _check_archive(stream, f"{common} is damaged: it")

    def read(self, key: str, at: Shape = ()) -> torch.Tensor:
        """Tensor `key`, or the part of it with the leading indices `at`: shape[len(at):], in its own dtype, on the CPU.

        Raises:
            DataError: if the pieces do not make up the whole of it, or cannot be read.
        """
        stored = self.all[key]
        lead = len(at)
        parts = [(offset, shape) for offset, shape in stored.pieces if _holds(offset, shape, at)]
        wanted = stored.shape[lead:]
        if sum(_count(shape[lead:]) for _, shape in parts) != _count(wanted):
            raise DataError(
                f"{self.path}: {key}{list(at) if at else ''} is not complete", "its pieces do not make up the whole"
            )
        whole = None
        for offset, shape in parts:
            piece = self._piece(key, offset, shape)[tuple(i - o for i, o in zip(at, offset, strict=False))]
            if tuple(piece.shape) == wanted:
                return piece
            whole = torch.empty(wanted, dtype=stored.dtype) if whole is None else whole
            whole[tuple(slice(o, o + n) for o, n in zip(offset[lead:], shape[lead:], strict=True))] = piece
        return torch.empty(wanted, dtype=stored.dtype) if whole is None else whole

    def _piece(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """One piece as it was stored; the last is kept, as a grouped layer's piece is asked for once for each
        expert."""
        if self._last is not None and self._last[0] == (key, offset):
            return self._last[1]
        self._last = None  # before the next one is read, so that only one is in memory
        info = self.where[MetadataIndex(key, torch.Size(offset))]
        file = self.path / info.relative_path
        try:
            with file.open("rb") as stream:
                view: Any = io.BufferedReader(_Window(stream, info.offset, info.length))
                tensor = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DataError(f"{file}: {key} cannot be read: {' '.join(str(error).split())[:200]}") from error
        found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if found != list(shape):
            raise DataError(f"{file}: {key} is {found}, .metadata says {list(shape)}")
        self._last = ((key, offset), tensor)
        return tensor


def _places(metadata: Any) -> dict[MetadataIndex, Any]:
    """Where each piece is: in which file of the checkpoint's own directory, from which byte on.

    Raises:
        ValueError: for anything else.
    """
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if type(index) is not MetadataIndex or type(name) is not str or not name or Path(name).name != name:
            raise ValueError(f"it places {index} in {name!r}, which is not a file next to it")
        if not _is_count(info.offset) or not _is_count(info.length):
            raise ValueError(f"it says that {index} is {info.length!r} bytes from {info.offset!r} on")
    return dict(metadata.storage_data)


def _tensors(metadata: Any) -> dict[str, Stored]:
    """The tensors by name.

    Raises:
        ValueError: if a size or a name is invalid.
    """
    found = {}
    for key, value in metadata.state_dict_metadata.items():
        if type(key) is not str:
            raise ValueError(f"it has a tensor of the name {key!r}")
        if not isinstance(value, TensorStorageMetadata):
            continue
        pieces = tuple((_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in value.chunks)
        if not isinstance(value.properties.dtype, torch.dtype):
            raise ValueError(f"{key} has no dtype")
        found[key] = Stored(_shape(value.size), value.properties.dtype, pieces)
        if any(len(part) != len(found[key].shape) for piece in pieces for part in piece):
            raise ValueError(f"{key} has pieces of other dimensions")
    return found


def _shape(sizes: Any) -> Shape:
    if not isinstance(sizes, tuple | list) or not all(map(_is_count, sizes)):
        raise ValueError(f"{sizes!r} is no shape")
    return tuple(sizes)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def refuse_passing(error: Exception) -> None:
    """Raise an error that says something of this host at this moment, and nothing of what is stored."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in STALE):
        raise error


def _check_archive(stream: BinaryIO, what: str) -> None:
    """Raise DataError if a file is not a zip archive, or a record of it fails its checksum."""
    try:
        bad = zipfile.ZipFile(stream).testzip()
    except Exception as error:  # zipfile's own, zlib's, and whatever a damaged directory of it leads to
        refuse_passing(error)
        raise DataError(
            f"{what} cannot be read ({type(error).__name__}: {error})", "the disk has changed it since it was written"
        ) from error
    if bad is not None:
        raise DataError(f"{what} fails its checksum", "the disk has changed it since it was written")


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self.stream = stream
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        self.at = max(0, base + offset)
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        self.stream.seek(self.start + self.at)
        count = self.stream.readinto(view)  # type: ignore[attr-defined]
        self.at += count
        return count


def _holds(offset: Shape, shape: Shape, at: Shape) -> bool:
    """Whether a piece has a part with the leading indices `at`."""
    return all(o <= i < o + n for i, o, n in zip(at, offset, shape, strict=False))


def _count(shape: Shape) -> int:
    return torch.Size(shape).numel()


# ---- where checkpoints are


def latest(directory: Path) -> Path | None:
    """The checkpoint that the tracker file names, or None if there is no tracker.

    Raises:
        HpcrlError: if the tracker names a checkpoint that is not there.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = read_given_bytes(tracker).decode(errors="replace").strip()
    number = count_of(text)
    path = directory / text[:LONGEST] if number is None else step(directory, number)
    if Path(text).name != text or len(os.fsencode(text)) > LONGEST or not path.is_dir():
        raise HpcrlError(
            f"{tracker} names {text[:LONGEST]!r}, which does not exist",
            "write the number of an iter_* directory into it",
        )
    return path


def step(directory: Path, number: int) -> Path:
    """Where the checkpoint of rollout (Megatron-LM: iteration) `number` is."""
    return directory / f"iter_{number:07d}"


def find_checkpoint(directory: Path, ckpt_step: int | None, flag: str) -> Path:
    """The torch_dist checkpoint that a user means by `directory`: itself, its step, or the one that its tracker names.

    Raises:
        DataError: naming `flag`, if there is none.
    """
    if ckpt_step is not None:
        if not (path := step(directory, ckpt_step)).is_dir():
            steps = sorted(n for p in directory.glob("iter_*") if (n := count_of(p.name[5:])) is not None)
            there = ", ".join(map(str, steps)) or "none"
            raise DataError(f"{flag} {directory} has no step {ckpt_step}", f"steps there: {there}")
        return path
    if (directory / ".metadata").is_file():
        return directory
    if path := latest(directory):
        return path
    what = f"holds no {TRACKER} and no model" if directory.is_dir() else "is not a directory"
    raise DataError(f"{flag} {directory} {what}", "name a directory that a run saved to, or a Hugging Face model")
