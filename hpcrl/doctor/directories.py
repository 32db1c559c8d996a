"""The directories that a run needs, as the login node sees them: the model's (are its files whole, does its tokenizer
load) and the run's (writable, on a file system that every node sees, with room, and with the same clock).

Invariants: no weights are read, only the headers of their files; the tokenizer is loaded in a separate process, so
that a package that hangs or crashes costs a deadline and a line.  Nothing stays behind: the one file that is written to
try is removed at once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.safetensors_files import AGAIN, SINGLE, read_header, read_index
from hpcrl.run.process import run_command
from hpcrl.utils.check_results import Finding, count, last_line, size
from hpcrl.utils.untrusted_files import read_system

SECONDS = 120.0
_LOAD = "import sys; from hpcrl.rollout.prompts.tokenizer import load_tokenizer as f; print(f(sys.argv[1]).vocab_size)"


def check_model_directory(directory: str, python: str = sys.executable, seconds: float = SECONDS) -> Iterator[Finding]:
    """Findings about --hf-checkpoint."""
    path = Path(directory)
    try:
        read_config(path)
    except DataError as error:
        yield Finding("fail", "", error.what, error.hint)
        return
    yield from files(path)
    answer = run_command([python, "-c", _LOAD, str(path)], seconds)
    if answer.code == 0:
        yield Finding("ok", "", f"the tokenizer loads; {last_line(answer.out)} token ids")
    else:
        why = answer.last_output.removeprefix("hpcrl.errors.DataError: ")
        yield Finding("fail", "", f"the tokenizer of {directory} does not load: {why}", "fix the model's directory")


def weights(path: Path) -> list[Path]:
    """The weight files that the directory should have.

    Raises:
        DataError: if its index cannot be read.
    """
    where = read_index(path)
    return [path / name for name in ([SINGLE] if where is None else sorted(set(where.values())))]


def files(path: Path) -> list[Finding]:
    """Whether every weight file is there and as long as its header says."""
    try:
        wanted = weights(path)
    except DataError as error:
        return [Finding("fail", "", error.what, error.hint or AGAIN)]
    wrong = [Finding("fail", "", why, AGAIN) for file in wanted if (why := flaw(file))]
    return wrong or [Finding("ok", "", f"weights in {path}: {count(len(wanted), 'file')}, whole, {size(total(path))}")]


def flaw(file: Path) -> str:
    """What is wrong with a safetensors file, "" if nothing: its header must describe the file to the last byte."""
    try:
        read_header(file)
    except DataError as error:
        return error.what
    return ""


def total(path: Path) -> int:
    """Bytes of the weight files that are there; 0 without any."""
    try:
        return sum(file.stat().st_size for file in weights(path) if file.is_file())
    except DataError:
        return 0


# ---- where the run directory will be

#: file systems that a node has for itself, as /proc/mounts names them
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"}
#: bytes of a checkpoint for each byte of a bfloat16 model: weights, and float32 weights and two moments of Adam
CHECKPOINT = 7
SKEW = 1.0  #: seconds between our clock and the file server's that do not matter


def check_storage(directory: Path, several: bool, model_bytes: int = 0) -> Iterator[Finding]:
    """Findings about the run directory that is to be made.

    Args:
        several: whether more than one node will use it.
    """
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    if not parent.is_dir():
        yield Finding("fail", "", f"run directory {directory}: {parent} is not a directory", "choose another --run-dir")
        return
    before = time.time()
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".hpcrl-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            stamp, after = os.stat(file.name).st_mtime, time.time()
    except OSError as error:
        yield Finding("fail", "", f"{parent} is not writable: {error.strerror}", "choose another --run-dir")
        return
    yield Finding("ok", "", f"{parent} is writable")
    yield file_system(parent, read_system("/proc/self/mounts"), several)
    yield room(os.statvfs(parent), parent, model_bytes)
    # a file's time may be as coarse as a tick of the kernel's clock, 10 ms
    ahead = max(before - 0.02 - stamp, stamp - after, 0.0)
    if ahead > SKEW:
        yield Finding(
            "warn", "", f"the clock here and the file server's differ by {ahead:.1f} s", "ask the site to look at NTP"
        )


def file_system(directory: Path, mounts: str, several: bool) -> Finding:
    """Whether the file system of a directory is one that nodes share; `mounts` is the text of /proc/mounts."""
    point, kind = mount_of(directory.resolve(), mounts)
    shown = f"{directory} is on {kind} at {point}"
    if not several:
        return Finding("ok", "", shown)
    if kind in LOCAL:
        return Finding(
            "warn", "", f"{shown}, which other nodes may not see", "choose a --run-dir on the shared file system"
        )
    if directory.resolve().parts[:2] in (("/", "tmp"), ("/", "dev")):
        return Finding(
            "warn",
            "",
            f"{directory} is each node's own on most systems",
            "choose a --run-dir on the shared file system",
        )
    return Finding("ok", "", shown)


def mount_of(directory: Path, mounts: str) -> tuple[str, str]:
    """(mount point, type) of a directory: the longest mount point above it, the last of equals."""
    best = ("/", "unknown")
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        # /proc/mounts writes a space as \040, and so on (fstab(5))
        point = words[1].encode("latin-1", "replace").decode("unicode_escape")
        if directory.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, words[2])
    return best


def room(stat: os.statvfs_result, directory: Path, model_bytes: int) -> Finding:
    """Whether a checkpoint fits, and then a few; without a model only what is free."""
    free, one = stat.f_bavail * stat.f_frsize, CHECKPOINT * model_bytes
    shown = f"{size(free)} free in {directory}" + (f", a checkpoint needs about {size(one)}" if one else "")
    if free < max(one, 1 << 30):
        return Finding("fail", "", shown, "free space, or choose another --run-dir")
    if free < 3 * one:
        return Finding("warn", "", shown, "fewer than three checkpoints fit: save seldom, or free space")
    return Finding("ok", "", shown)
