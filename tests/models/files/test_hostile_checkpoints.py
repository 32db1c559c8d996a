"""Checkpoints from others: whatever their files hold, reading them gives tensors or one error, and does nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpcrl.cli.main import main
from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.files.torch_dist import TorchDist, find_checkpoint, latest
from tests.transport.pickles.examples import attacks

KEY = "embedding.word_embeddings.weight"


def stored(tensor: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint of one tensor.

    Args:
        changes: of what `.metadata` says of it, or `payload`, the bytes of its file.
    """
    folder.mkdir()
    payload = changes.pop("payload", stored(torch.ones(2, 3)))
    said = {"name": "__0_0.distcp", "offset": 0, "length": len(payload), "size": torch.Size([2, 3]), "key": KEY}
    said |= {"offsets": torch.Size([0, 0]), "sizes": torch.Size([2, 3]), "dtype": torch.float32} | changes
    index = MetadataIndex(KEY, torch.Size([0, 0]))
    chunk = ChunkStorageMetadata(said["offsets"], said["sizes"])
    tensor = TensorStorageMetadata(TensorProperties(dtype=said["dtype"]), said["size"], [chunk])
    info = _StorageInfo(said["name"], said["offset"], said["length"])
    (folder / "__0_0.distcp").write_bytes(payload)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({said["key"]: tensor}, storage_data={index: info})))
    return folder


def test_the_checkpoint_that_is_changed_here_is_sound(tmp_path: Path) -> None:
    assert torch.equal(TorchDist(checkpoint(tmp_path / "c")).read(KEY), torch.ones(2, 3))


LIES: dict[str, dict[str, Any]] = {
    "a file above": {"name": "../secret"},
    "a file elsewhere": {"name": "/etc/passwd"},
    "a device": {"name": "/dev/zero"},
    "a name with a slash": {"name": "a/b"},
    "no name": {"name": ""},
    "a number as a name": {"name": 5},
    "the directory": {"name": "."},
    "the one above": {"name": ".."},
    "a negative offset": {"offset": -1},
    "an offset of text": {"offset": "0"},
    "a length of more than there is": {"length": 1 << 61},
    "a length that wraps": {"length": 1 << 63},
    "a length of a list": {"length": [1]},
    "sizes of text": {"size": ["a", "b"]},
    "a negative size": {"size": (-2, 3)},
    "no sizes": {"size": None},
    "pieces of other dimensions": {"offsets": (0,), "sizes": (2,)},
    "no dtype": {"dtype": "float32"},
    "a name that is a number": {"key": 7},
    "a payload that is a program": {"payload": stored(attacks(Path("made"))["mkdir"])},
    "a payload of nothing": {"payload": b""},
    "a payload of zeros": {"payload": bytes(4096)},
    "a payload that is no tensor": {"payload": stored({"a": 1})},
    "a payload of another shape": {"payload": stored(torch.ones(3, 2))},
}


@pytest.mark.parametrize("lie", LIES)
def test_what_metadata_says_leads_nowhere_else(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error, and no file is read or made that is not the checkpoint's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(stored(torch.ones(2, 3)))
    path = checkpoint(tmp_path / "c", **LIES[lie])
    with pytest.raises(DataError) as caught:
        TorchDist(path).read(KEY)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["fifo", "device", "endless"])
def test_a_metadata_that_never_ends_is_not_read(kind: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    (path / ".metadata").unlink()
    if kind == "fifo":
        os.mkfifo(path / ".metadata")
    elif kind == "device":
        (path / ".metadata").symlink_to("/dev/zero")
    else:
        with (path / ".metadata").open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(DataError):
        TorchDist(path)


@pytest.mark.parametrize(
    "text", ["../../etc", "/etc", "iter_9999999999", "\x1b[2J", "9" * 5000, "", "a\x00b", "\U0001f600" * 200, "\udcff"]
)
def test_a_tracker_that_names_something_else(text: str, tmp_path: Path) -> None:
    """The error has the directory that was not found, or what is found there holds no checkpoint."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(HpcrlError):
        TorchDist(latest(tmp_path) or tmp_path)


def test_steps_of_other_directories_are_left_out(tmp_path: Path) -> None:
    for name in ("iter_0000005", "iter_0000005_backup", "iter_foo"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="no step 7;.*: 5$"):
        find_checkpoint(tmp_path, 7, "--load")


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_a_pickle_in_place_of_metadata(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hpcrl convert to-hf` ends with one error, whatever `.metadata` asks for."""
    monkeypatch.chdir(tmp_path)
    made, path = tmp_path / "made", checkpoint(tmp_path / "c")
    (path / ".metadata").write_bytes(pickle.dumps(attacks(made)[name], 4))
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 1}')
    words = ["--input-dir", str(path), "--origin-hf-dir", str(tmp_path / "origin"), "--output-dir", str(tmp_path / "o")]
    assert main(["convert", "to-hf", *words]) != 0
    said = capsys.readouterr().err
    assert said.startswith("hpcrl: error: ") and "Traceback" not in said
    assert not made.exists()
