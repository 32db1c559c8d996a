"""--weight-transfer disk: a directory of safetensors for each version, for engines that no network group reaches.

    DIR/version-00000007/model-00001.safetensors, ..., model.safetensors.index.json

It is written while engines still generate, and has its name once every byte of it is on disk.  Engines are told over
HTTP where it is, with a digest of each file, and read it themselves; afterwards it goes.  A hook may bring it to where
they see it.  It is a directory as Hugging Face's are, so what is not started by hpcrl can read it too.

Invariants: a directory that has its name is whole; at most one bucket is held in memory; nothing is left behind but by
a run that is killed, and that goes when the next attempt connects.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.model_files.safetensors_files import INDEX, ITEM_BYTES
from hpcrl.weights.bucket import Bucket, fill, view
from hpcrl.weights.transports import Link, Stream, TransportConditions

BACKEND = "hpcrl_disk"


def obstacle(site: TransportConditions) -> str | None:
    return None


class DiskTransport:
    """One directory an update."""

    def __init__(self, link: Link) -> None:
        self.fleet = link.fleet
        self.limit = link.limit
        self.written = link.written
        self.bytes = 0
        root = link.fleet.rundir.root
        self.base = Path(link.directory) / f"weights-of-{root.name}" if link.directory else root / "weights"
        self.there: Path | None = None
        self.files: dict[str, str] = {}  # name -> digest

    def connect(self) -> None:
        self._remove(self.base)
        self.fleet.post("the weight transfer's init", "/init_weight_transfer_engine", {"init_info": {}})

    def stage(self, tensors: Stream, version: int) -> None:
        """Raise HpcrlError if it cannot be written."""
        self._remove(self.there)
        there = self.base / f"version-{version:08d}"
        staging = there.with_name(f".partial-{there.name}")
        try:
            staging.mkdir(parents=True)
            self._write(tensors, staging)
            from hpcrl.model_files.hf_writer import settle_directory

            self.there = there
            settle_directory(staging, there)
        except OSError as error:
            raise HpcrlError(
                f"the weights cannot be written to {there}: {error.strerror}",
                "free space, or give --update-weight-disk-dir",
            ) from error
        finally:
            self._remove(staging)
        if self.written is not None:
            self.written(there, self.fleet)

    def _write(self, tensors: Stream, directory: Path) -> None:
        import torch

        buffer = torch.empty(0, dtype=torch.uint8)

        def room(_: int, size: int) -> torch.Tensor:
            nonlocal buffer
            if buffer.numel() < size:
                buffer = torch.empty(size, dtype=torch.uint8)
            return buffer

        self.files = {}
        self.bytes = 0
        where = dict[str, str]()
        for number, (bucket, found, _) in enumerate(fill(tensors, self.limit, room), 1):
            name = f"model-{number:05d}.safetensors"
            self.files[name] = self._write_file(directory / name, bucket, found)
            self.bytes += sum(slot.nbytes for slot in bucket.slots)
            where |= {slot.name: name for slot in bucket.slots}
        index = {"metadata": {"total_size": self.bytes}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index))

    def _write_file(self, path: Path, bucket: Bucket, buffer: Any) -> str:
        """The digest of the file.  Wider dtypes come first, so that every tensor is at a multiple of its item's
        size."""
        import torch

        from hpcrl.model_files.hf_writer import TensorHeader, header

        slots = sorted(bucket.slots, key=lambda slot: -ITEM_BYTES[slot.dtype])
        found = hashlib.blake2b(digest_size=16)
        with path.open("wb") as file:
            for part in (header([TensorHeader(s.name, getattr(torch, s.dtype), s.shape) for s in slots]), *slots):
                data = (
                    part if isinstance(part, bytes) else view(buffer, part).reshape(-1).view(torch.uint8).numpy().data
                )
                found.update(data)
                file.write(data)
        return found.hexdigest()

    def send(self) -> None:
        assert self.there is not None, "stage() comes first"
        info = {"directory": str(self.there), "files": self.files}
        self.fleet.post("the weight update", "/update_weights", {"update_info": info})
        self.close()

    def close(self) -> None:
        self._remove(self.there)
        self.there = None

    def _remove(self, path: Path | None) -> None:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


make = DiskTransport
