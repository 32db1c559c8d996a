"""--weight-transfer disk: whole directories that come and go, and an engine that reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.models.files.safetensors_files import SafetensorsDirectory
from hpcrl.run.rundir import RunDir
from hpcrl.weights.disk import DiskUpdate
from tests.support.engines import CLOSE, SMALL, Side, WholeTensors
from tests.support.forked_engines import Nursery
from tests.support.tiny import make_model

TENSORS = {
    "norm": torch.arange(5, dtype=torch.bfloat16),
    "wide": torch.randn(64, 64),
    "codes": torch.randn(8, 8).to(torch.float8_e4m3fn),
    "last": torch.randn(40, 3),
}


class Posts:
    """A fleet that notes what it is told."""

    def __init__(self, root: Path) -> None:
        self.rundir = RunDir(root)
        self.told = list[Any]()
        self.seen = dict[str, torch.Tensor]()

    def post(self, phase: str, path: str, body: Any = None) -> None:
        self.told.append((path, body))
        if path == "/update_weights":
            there = Path(body["update_info"]["directory"])
            assert [path.name for path in there.parent.iterdir()] == [there.name], "nothing but what has its name"
            for name, digest in body["update_info"]["files"].items():
                assert hashlib.blake2b((there / name).read_bytes(), digest_size=16).hexdigest() == digest
            with ExitStack() as stack:
                files = SafetensorsDirectory(there, stack)
                self.seen = {name: files.slice(name)[:] for name in files.where}


def options(directory: Path) -> Options:
    return Options(update_weight_buffer_size=4096, update_weight_disk_dir=str(directory))


def stage(update: DiskUpdate, version: int, checked: Any = lambda tensors: tensors) -> None:
    update.stage(WholeTensors(list(TENSORS.items())), checked, False, version)  # type: ignore[arg-type]


def test_model_directory_is_removed_later(tmp_path: Path) -> None:
    """What is published is a model directory, which is removed afterwards."""
    fleet = Posts(tmp_path / "run")
    left = tmp_path / "disk" / "weights-of-run-me" / "version-00000001"
    left.mkdir(parents=True)
    written: list[list[str]] = []

    def note(there: Path, _: object) -> None:
        written.append(sorted(path.name for path in there.iterdir()))

    another = tmp_path / "disk" / "weights-of-run-other" / "version-00000001"
    another.mkdir(parents=True)
    made = DiskUpdate(fleet, options(tmp_path / "disk"), None, note, "me")  # type: ignore[arg-type]
    assert not left.exists(), "of an attempt that was killed"
    assert another.exists(), "of another run of this name"
    for version in (3, 4):
        stage(made, version)
        assert [path.name for path in left.parent.iterdir()] == [f"version-{version:08d}"]
        made.send()
        assert list(left.parent.iterdir()) == []
    assert len(written) == 2 and all(names[-1] == "model.safetensors.index.json" for names in written), (
        "whole before it is told of"
    )
    assert set(fleet.seen) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert fleet.seen[name].dtype == tensor.dtype
        assert torch.equal(fleet.seen[name].view(torch.uint8), tensor.view(torch.uint8))
    assert made.bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    stage(made, 5)
    made.forget()
    assert list(left.parent.iterdir()) == []


def test_unwritable_directory(tmp_path: Path) -> None:
    """A directory that cannot be written is an error and leaves nothing."""
    (tmp_path / "full").write_text("a file where a directory was to be")
    fleet = Posts(tmp_path / "run")
    made = DiskUpdate(fleet, options(tmp_path / "full"), None)  # type: ignore[arg-type]
    with pytest.raises(HpcrlError, match="full.* cannot be created.*--update-weight-disk-dir"):
        stage(made, 1)

    def broken(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from islice(tensors, 2)
        raise PeerError("a rank died")

    made = DiskUpdate(fleet, options(tmp_path / "disk"), None, None, "me")  # type: ignore[arg-type]
    with pytest.raises(PeerError):
        stage(made, 1, broken)
    assert list((tmp_path / "disk" / "weights-of-run-me").iterdir()) == []


@pytest.mark.vllm
def test_engine_refuses_damage(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine reads them and refuses what was damaged."""
    model = make_model(tmp_path / "model", tied=True)
    values = {"weight_transfer": "disk", "check_weight_update_equal": True, "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / "run", model, **values)
    side = Side(engines, model)
    for _ in range(2):
        side.step()
        assert side.distance() <= CLOSE
    send = DiskUpdate.send

    def damaged(self: DiskUpdate) -> None:
        assert self.there is not None
        path = sorted(self.there.glob("*.safetensors"))[-1]
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        send(self)

    monkeypatch.setattr(DiskUpdate, "send", damaged)
    with pytest.raises(PeerError, match="differs from what"):
        side.step()
    monkeypatch.undo()
    side.step()
    assert side.distance() <= CLOSE
    side.close()
    assert list((tmp_path / "run" / "weights").iterdir()) == []
    assert engines.stop() == [0]
