"""A Hugging Face model directory, written file by file and whole or not at all.

    with directory(output, force=False) as staging:                    # renamed to `output` at the end
        plan = split([[TensorHeader("model.norm.weight", torch.bfloat16, (64,))], ...], chunk_size)
        save_shards(staging, plan, read)                               # read(file) yields the tensors of one file
        copy_assets(origin, staging)

Invariants: what one worker holds in memory are the tensors of one file; the directory appears under its name only when
every byte of it is on disk; a directory that was there stays until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.files import safetensors_files
from hpcrl.models.files.config_json import CONFIG, read_object, write_config
from hpcrl.models.files.safetensors_files import INDEX, SINGLE
from hpcrl.run.rundir import flush

#: torch's dtypes by safetensors' names
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in safetensors_files.DTYPES.items()}


Tensors = Iterable[tuple[str, torch.Tensor]]


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

    A group is what comes out of one source, such as queries, keys and values.
    """
    files: list[list[TensorHeader]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.size for tensor in group)
        if filled and filled + size > chunk_size:
            files.append([])
            filled = 0
        files[-1] += group
        filled += size
    return files


def _save_file(path: Path, read: Callable[[], Tensors]) -> dict[str, int]:
    """Write one safetensors file: the bytes of each tensor in it."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in read()}
    save_file(held, path, {"format": "pt"})
    return {name: tensor.nbytes for name, tensor in held.items()}


def save_files(
    path: Path, files: Mapping[str, Callable[[], Tensors]], workers: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Write safetensors files into a directory; each name with the bytes of its tensors, as soon as it is written.

    Args:
        files: name -> what reads its tensors.
        workers: threads that write; each holds the tensors of one file.
    """
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        jobs = {pool.submit(_save_file, path / name, read): name for name, read in files.items()}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def save_shards(
    path: Path,
    plan: Sequence[Sequence[TensorHeader]],
    read: Callable[[Sequence[TensorHeader]], Tensors],
    workers: int = 1,
) -> None:
    """Write the files of a plan and their index.

    Args:
        read: the tensors of one file.
        workers: as of `save_files`.
    """
    total = len(plan)
    names = [SINGLE] if total == 1 else [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    files = {name: partial(read, file) for name, file in zip(names, plan, strict=True)}
    deque(save_files(path, files, workers), maxlen=0)
    if total > 1:
        where = {tensor.name: name for name, file in zip(names, plan, strict=True) for tensor in file}
        write_index(path, where, sum(tensor.size for file in plan for tensor in file))


def write_index(path: Path, where: Mapping[str, str], size: int) -> None:
    """Say in which file each tensor is.

    Args:
        size: bytes of all.
    """
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def directory(output: Path, force: bool, hint: str = "") -> Iterator[Path]:
    """A directory next to `output` to write in: it takes that name at the end, and is removed if anything fails.

    Args:
        hint: what to do if it cannot be written.

    Raises:
        UsageError: if `output` is there and force is not given, or cannot be made.
    """
    if output.exists() and not force:
        raise UsageError(f"{output} exists already", "give --force to replace it")
    staging = output.with_name(f".partial-{output.name}")
    try:
        shutil.rmtree(staging, ignore_errors=True)  # of a conversion that was killed
        staging.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"{staging} cannot be created: {error.strerror}", hint or "choose a writable directory"
        ) from error
    try:
        yield staging
        settle_directory(staging, output)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(staging.parent).free / 1e6
        why = error.strerror if isinstance(error, OSError) else error
        raise HpcrlError(f"{output} was not written: {why} ({free:.1f} MB are free there)", hint) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def settle_directory(staging: Path, output: Path) -> None:
    """Flush what is in `staging`, then let it take the place of `output`."""
    for path in [*staging.rglob("*"), staging]:
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
