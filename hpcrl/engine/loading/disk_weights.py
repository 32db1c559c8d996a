"""What engines read of --weight-transfer disk: one update names a directory of safetensors on a file system that both
sides have.

Invariant: names, shapes, dtypes and the digest of every file are checked before anything is loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from hpcrl.models.files.safetensors_files import open_file
from hpcrl.utils.waiting import Deadline

APPEARS = 20.0  #: seconds until a file that another host wrote shows on a network file system
CHUNK = 1 << 24  #: bytes of one read, for a digest


def check_digest(path: Path, digest: str) -> None:
    """Raise ValueError unless the bytes of a file are those that were written, OSError if it cannot be read.

    Args:
        digest: blake2b, 16 bytes, hex.
    """
    end = Deadline(APPEARS)
    while not path.exists() and not end.over:
        time.sleep(0.1)
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    if found.hexdigest() != digest:
        raise ValueError(f"{path} differs from what was written")


def tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the files, one after the other."""
    for path in paths:
        with open_file(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
