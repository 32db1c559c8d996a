"""The receiving end of --weight-transfer disk: one update names a directory of safetensors on a file system that both
sides have.

Invariant: names, shapes, dtypes and the digest of every file are checked before anything is loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from hpcrl.engine.weight_loading import Receiver, UpdateRejected
from hpcrl.errors import DataError
from hpcrl.model_files.safetensors_files import open_file, read_header
from hpcrl.toolbox.deadline import Deadline
from hpcrl.weights.bucket import Slot

APPEARS = 20.0  #: seconds until a file that another host wrote shows on a network file system
CHUNK = 1 << 24  #: bytes that are read at once for a digest


@dataclass
class DiskInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """The directory, and the blake2b digest (16 bytes, hex) of each file in it."""

    directory: str
    files: dict[str, str]


class DiskReceiver(Receiver):
    """Reads what the trainer wrote."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def init_transfer_engine(self, init_info: DiskInit) -> None:
        pass

    def receive_weights(self, update_info: DiskUpdate) -> None:
        account = self._open_account()
        paths = [Path(update_info.directory) / name for name in update_info.files]
        if any(path.name != name for path, name in zip(paths, update_info.files, strict=True)):
            raise UpdateRejected("the update names a file outside of its directory")
        try:
            for path, digest in zip(paths, update_info.files.values(), strict=True):
                check(path, digest)
                account.admit([Slot(name, entry.dtype, entry.shape, 0) for name, entry in read_header(path).items()])
            account.close()
            self.load(tensors(paths), last=True)
        except (OSError, DataError) as error:
            raise UpdateRejected(
                f"the weights cannot be read ({error}): --update-weight-disk-dir must lie on a file system that "
                "engines have too"
            ) from error


def check(path: Path, digest: str) -> None:
    """UpdateRejected unless the bytes of a file are those that were written.

    Raises:
        OSError: if it cannot be read.
    """
    end = Deadline(APPEARS)
    while not path.exists() and not end.over:
        time.sleep(0.1)
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    if found.hexdigest() != digest:
        raise UpdateRejected(f"{path} holds other bytes than were written")


def tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the files, one after the other."""
    for path in paths:
        with open_file(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


RECEIVER = DiskReceiver
