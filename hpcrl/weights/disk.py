"""--weight-transfer disk: a directory of safetensors for each version, for engines that no network group reaches.

    DIR/version-00000007/model-00001.safetensors, ..., model.safetensors.index.json

It is written while engines still generate, and has its name once every byte of it is on disk.  Engines learn over
HTTP where it is, with a digest of each file, and read it themselves; afterwards it goes.  A hook may bring it to where
they see it.  It is a directory as Hugging Face's are, so what is not started by hpcrl can read it too.

Invariants: a directory that has its name is whole; at most one file of --update-weight-buffer-size is held in memory,
and once more while it is written; nothing is left behind but by a run that is killed, and that goes when the next
attempt connects.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineBroadcast
from hpcrl.models.files.fp8 import Scheme, Stream, quantized
from hpcrl.models.files.hf_writer import directory, write_index

if TYPE_CHECKING:
    import torch

    from hpcrl.weights.pieces.planning import Source

Written = Callable[[Path, EngineBroadcast], None]  #: called with each directory that is complete


class DiskUpdate:
    """One directory an update; `bytes` counts those of the last one."""

    def __init__(
        self,
        fleet: EngineBroadcast,
        options: Options,
        scheme: Scheme | None,
        written: Written | None = None,
        identity: str = "run",
    ) -> None:
        """Remove what an earlier attempt left.

        Args:
            identity: the run's, since many runs, of one name too, may share --update-weight-disk-dir.
        """
        self.fleet = fleet
        self.limit = options.update_weight_buffer_size
        self.scheme = scheme
        self.written = written
        self.bytes = 0
        root = fleet.rundir.root
        given = options.update_weight_disk_dir
        self.base = Path(given) / f"weights-of-{root.name}-{identity}" if given else root / "weights"
        self.there: Path | None = None
        self.files: dict[str, str] = {}  # name -> digest
        self._remove(self.base)

    def stage(self, ranks: Source, checked: Callable[[Stream], Stream], compare: bool, version: int) -> None:
        """Write every tensor.

        Raises:
            HpcrlError: if it cannot be written.
        """
        self.forget()
        self.there = there = self.base / f"version-{version:08d}"
        with directory(there, force=True, hint="free space, or give --update-weight-disk-dir") as staging:
            self._write(checked(quantized(ranks.gathered(), self.scheme)), staging)
        if self.written is not None:
            self.written(there, self.fleet)

    def _write(self, tensors: Stream, staging: Path) -> None:
        from safetensors.torch import save

        self.files = {}
        self.bytes = 0
        where = dict[str, str]()
        for number, file in enumerate(self._files(tensors), 1):
            name = f"model-{number:05d}.safetensors"
            data = save(file, {"format": "pt"})
            (staging / name).write_bytes(data)
            self.files[name] = hashlib.blake2b(data, digest_size=16).hexdigest()
            self.bytes += sum(tensor.nbytes for tensor in file.values())
            where |= dict.fromkeys(file, name)
        write_index(staging, where, self.bytes)

    def _files(self, tensors: Stream) -> Iterator[dict[str, torch.Tensor]]:
        """Tensors of one file each: of at most `limit` bytes, or a single one."""
        import torch

        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if found and sum(one.nbytes for one in found.values()) + tensor.nbytes > self.limit:
                yield found
                found = {}
            found[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)  # none shares another's memory
        if found:
            yield found

    def send(self) -> None:
        """Have every engine read it."""
        assert self.there is not None, "stage() comes first"
        info = {"directory": str(self.there), "files": self.files}
        self.fleet.post("the weight update", "/update_weights", {"update_info": info})
        self.forget()

    def forget(self) -> None:
        """Remove what was written."""
        self._remove(self.there)
        self.there = None

    def _remove(self, path: Path | None) -> None:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
