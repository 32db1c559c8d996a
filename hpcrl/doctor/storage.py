"""Where the run directory will lie: writable, on a file system that every node sees, with room, and with the same
clock.

Invariant: nothing stays behind: the one file that is written to try is removed at once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrl.findings import Finding, size

#: file systems that a node has for itself, as /proc/mounts names them
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"}
#: bytes of a checkpoint for each byte of a bfloat16 model: weights, and float32 weights and two moments of Adam
CHECKPOINT = 7
SKEW = 1.0  #: seconds between our clock and the file server's that nobody need mind


def check_storage(directory: Path, several: bool, model_bytes: int = 0) -> Iterator[Finding]:
    """Findings about the run directory that is to be made; `several`: whether more than one node will use it."""
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    if not parent.is_dir():
        yield Finding("fail", "", f"run directory {directory}: {parent} is no directory", "choose another --run-dir")
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
    yield file_system(parent, Path("/proc/mounts").read_text(encoding="utf-8", errors="replace"), several)
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
    shown = f"{directory} lies on {kind} at {point}"
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
