"""A Hugging Face model directory, written tensor by tensor and whole or not at all.

    with directory(output, force=False) as staging:                    # renamed to `output` at the end
        plan = split([[TensorHeader("model.norm.weight", torch.bfloat16, (64,))], ...], chunk_size)
        with SafetensorsWriter(staging, plan) as writer:
            for name in writer.names: writer.add(name, tensor)        # each file's in the order of writer.names
        copy_assets(origin, staging)

Invariants: one tensor at a time is in memory, since the header of each file is known before its first tensor; the
directory appears under its name only when every byte of it is on disk; a directory that was there stays until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.files import safetensors_files
from hpcrl.models.files.config_json import CONFIG, read_object, write_config
from hpcrl.models.files.safetensors_files import INDEX, SINGLE
from hpcrl.run.rundir import flush

#: torch's dtypes by safetensors' names
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in safetensors_files.DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split(groups: Sequence[Sequence[TensorHeader]], chunk_size: int) -> list[list[TensorHeader]]:
    """Tensors for each file, at most `chunk_size` bytes unless a group is larger; a group is never parted.

    A group is what comes out of one source, such as queries, keys and values.  Within a file wider dtypes come first,
    so that every tensor is at a multiple of its item's size.
    """
    files: list[list[Sequence[TensorHeader]]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.size for tensor in group)
        if filled and filled + size > chunk_size:
            files.append([])
            filled = 0
        files[-1].append(group)
        filled += size
    widest = [sorted(file, key=lambda group: -max((t.dtype.itemsize for t in group), default=0)) for file in files]
    return [[tensor for group in file for tensor in group] for file in widest]


class SafetensorsWriter:
    """The safetensors files of a plan; use it as a context, and add every tensor.

    Those of one file come in the order of `names`; files may be written by several threads, each by one.
    """

    def __init__(self, path: Path, plan: list[list[TensorHeader]]) -> None:
        self.path = path
        self.plan = plan
        total = len(plan)
        self.files = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
        if total == 1:
            self.files = [SINGLE]
        self.names = [tensor.name for file in plan for tensor in file]
        self._file = {tensor.name: i for i, file in enumerate(plan) for tensor in file}
        self._left = [deque(file) for file in plan]
        self._open: dict[int, BinaryIO] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of its file.

        Raises:
            HpcrlError: if the plan has another one next (a defect).
        """
        i = self._file[name]
        wanted = self._left[i].popleft()
        if (name, tensor.dtype, tuple(tensor.shape)) != (wanted.name, wanted.dtype, wanted.shape):
            raise HpcrlError(f"{name} {list(tensor.shape)} {tensor.dtype} is not {wanted}, which is next")
        if i not in self._open:
            self._open[i] = (self.path / self.files[i]).open("wb")
            self._open[i].write(header(self.plan[i]))
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._open[i].write(memoryview(data.numpy()))
        if not self._left[i]:
            self._close(i)

    def _close(self, i: int) -> None:
        with self._open.pop(i) as file:
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for i in list(self._open):
            self._close(i)
        if kind is not None:
            return
        if left := [tensor.name for file in self._left for tensor in file]:
            raise HpcrlError(f"{len(left)} tensors were not written, {left[0]} first")
        if len(self.files) > 1:
            where = {
                tensor.name: file for file, tensors in zip(self.files, self.plan, strict=True) for tensor in tensors
            }
            size = sum(tensor.size for file in self.plan for tensor in file)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (self.path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def header(tensors: Sequence[TensorHeader]) -> bytes:
    """The length, and the JSON header padded with spaces to a multiple of 8 (the format's rule)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        span = [at, at := at + tensor.size]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextlib.contextmanager
def directory(output: Path, force: bool) -> Iterator[Path]:
    """A directory next to `output` to write in: it takes that name at the end, and is removed if anything fails.

    Raises:
        UsageError: if `output` is there and force is not given, or cannot be made.
    """
    if output.exists() and not force:
        raise UsageError(f"{output} is there already", "give --force to replace it")
    staging = output.with_name(f".partial-{output.name}")
    try:
        shutil.rmtree(staging, ignore_errors=True)  # of a conversion that was killed
        staging.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{staging} cannot be created: {error.strerror}", "choose a writable directory") from error
    try:
        yield staging
        settle_directory(staging, output)
    except OSError as error:
        free = shutil.disk_usage(staging.parent).free / 1e6
        raise HpcrlError(f"{output} was not written: {error.strerror} ({free:.1f} MB are free there)") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def settle_directory(staging: Path, output: Path) -> None:
    """Flush what is in `staging`, then let it take the place of `output`."""
    for path in [*staging.iterdir(), staging]:
        flush(path)
    old = None
    if output.exists():
        old = output.with_name(f".replaced-{output.name}")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(output, old)
    os.rename(staging, output)
    flush(output.parent)
    if old is not None:
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def copy_assets(origin: Path, output: Path, drop: Sequence[str] = ()) -> None:
    """Config, tokenizer and whatever else is small: every file of `origin` that holds no weights.

    Args:
        drop: keys that the copy's config.json shall not have.
    """
    weights = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".h5", ".msgpack", ".onnx")
    for path in sorted(origin.iterdir()):
        if path.is_file() and not path.name.endswith(weights) and not path.name.startswith("."):
            shutil.copyfile(path, output / path.name)
    held = read_object(origin, CONFIG, "--origin-hf-dir") or {}  # as it is, not with its text part laid open
    if any(key in held for key in drop):
        write_config(output, {k: v for k, v in held.items() if k not in drop})
