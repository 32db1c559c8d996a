"""What a model directory holds, read from whole files and from damaged ones."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.errors import DataError
from hpcrl.models.files.safetensors_files import (
    DTYPES,
    INDEX,
    SINGLE,
    Entry,
    listing,
    open_file,
    read_header,
    read_index,
)

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_every_dtype_by_torchs_name(tmp_path: Path) -> None:
    tensors = {code: torch.zeros(3, 0, 5).to(getattr(torch, name)) for code, name in DTYPES.items()}
    tensors |= {f"{code}.full": torch.ones(4, 2).to(getattr(torch, name)) for code, name in DTYPES.items()}
    save_file(tensors, tmp_path / SINGLE)
    assert listing(tmp_path) == {
        name: Entry(DTYPES[name.partition(".")[0]], tuple(tensor.shape), SINGLE) for name, tensor in tensors.items()
    }


def test_dtype_unknown_to_torch(tmp_path: Path) -> None:
    """A dtype that torch lacks is listed by its own name."""
    write(tmp_path / SINGLE, {"w": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 3]}}, bytes(3))
    assert listing(tmp_path) == {"w": Entry("f6_e3m2", (4,), SINGLE)}


def test_index_joins_files(tmp_path: Path) -> None:
    """An index joins files and hides tensors that it does not name."""
    write(tmp_path / "1.safetensors", {"a": F32}, bytes(16))
    write(tmp_path / "2.safetensors", {"b": F32 | {"data_offsets": [16, 32]}, "old": F32}, bytes(32))
    (tmp_path / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors"}})
    )
    assert {name: entry.file for name, entry in listing(tmp_path).items()} == {
        "b": "2.safetensors",
        "a": "1.safetensors",
    }
    assert list(read_header(tmp_path / "2.safetensors")) == ["old", "b"], "as they lie in the file"


def test_a_directory_without_any_has_none(tmp_path: Path) -> None:
    assert listing(tmp_path) == {} and read_index(tmp_path) is None
    with pytest.raises(DataError, match="model.safetensors.*is the directory complete"):
        open_file(tmp_path / SINGLE)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"a": F32}, 10, "file not fully covered"),
        ({"a": F32}, 17, "file not fully covered"),
        ({"a": F32, "b": F32 | {"data_offsets": [20, 36]}}, 36, "invalid offset for tensor"),
        ({"a": F32, "b": F32}, 16, "invalid offset"),
        ({"a": F32 | {"shape": [3, 2]}}, 16, "invalid shape"),
        ({"a": F32 | {"shape": [2**40, 2**40]}}, 16, "overflow"),
        ({"a": F32 | {"data_offsets": [-4, 16]}}, 16, "invalid value: integer `-4`"),
        ({"a": F32 | {"dtype": "F99"}}, 16, "unknown variant `F99`"),
        ({"a": {"dtype": "F32"}}, 16, "missing field"),
        ([], 0, "invalid type: sequence"),
        (b"hello", 50, "invalid JSON"),
        (b"\xff\xfe" * 9, 5, "invalid UTF-8"),
        (b"[" * 100_000, 0, "invalid JSON"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, header: Any, data: int, why: str) -> None:
    write(tmp_path / SINGLE, header, bytes(data))
    for read in (lambda: listing(tmp_path), lambda: open_file(tmp_path / SINGLE, "pt")):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value).startswith(f"{tmp_path / SINGLE} cannot be read: ")
        assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\1\2", b"\xff" * 64, b"<html>not found</html>", struct.pack("<Q", 99) + b"{}"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read: \w[^\n]*;.*damaged or not complete"):
        listing(tmp_path)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (b"", "is not an index"),
        (b"[]", "is not an index"),
        (b"{}", "is not an index"),
        (b'{"weight_map": {"a": 1}}', "is not an index"),
        (b'{"weight_map": {"a": "\xff"}}', "is not an index"),
        (b"[" * 100_000, "is not an index"),
        (b'{"weight_map": {"a": "../a.safetensors"}}', "names a file outside"),
        (b'{"weight_map": {"a": "/a.safetensors"}}', "names a file outside"),
        (b'{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors does not exist"),
        (b'{"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}', "names b, which 1.safetensors does not hold"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: bytes, why: str) -> None:
    write(tmp_path / "1.safetensors", {"a": F32}, bytes(16))
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(DataError) as caught:
        listing(tmp_path)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_login_node_needs_no_torch(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2).bfloat16()}, tmp_path / SINGLE)
    script = (
        "import sys; from hpcrl.models.files.safetensors_files import listing\n"
        f"print(listing({str(tmp_path)!r})['a'].dtype); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "bfloat16\n"), done.stderr
