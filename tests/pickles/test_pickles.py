"""Pickles of others: what is read, and that nothing that they name is called."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from hpcrl.errors import DataError
from hpcrl.model_files.torch_dist import TorchDist
from hpcrl.pickles import reader, records
from hpcrl.pickles.reader import PlainUnpickler, read_plain
from hpcrl.pickles.values import Refused
from tests.pickles import examples
from tests.pickles.examples import as_python_3_11_2, attacks, in_metadata


def by_name(module: str, name: str, argument: str) -> bytes:
    """The pickle of a call of `module`.`name`, dots and all, with one text."""
    text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + text + b"\x93X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85R."


class Notes(PlainUnpickler):
    """Which names were looked up."""

    seen: set[tuple[str, str]]

    def find_class(self, module: str, name: str) -> Any:
        self.seen.add((module, name))
        return super().find_class(module, name)


def test_metadata_is_read_as_every_writer_writes_it() -> None:
    """Protocols 4 and 5, and enumerations as Debian 12's Python pickles them; every name that a writer needs."""
    Notes.seen = set()
    for value in in_metadata():
        for data in (pickle.dumps(value, 4), pickle.dumps(value, 5), as_python_3_11_2(value)):
            assert Notes(io.BytesIO(data)).load() == value
    more = [[getattr(torch, name) for name in records.DTYPES], slice(1, None), OrderedDict(a=1)]
    assert Notes(io.BytesIO(pickle.dumps(more, 4))).load() == more
    listed = records.RECORDS | records.ENUMS | set(reader.MAKERS) | {("torch", name) for name in records.DTYPES}
    assert Notes.seen == listed


def test_what_messages_alone_hold_is_not_read() -> None:
    for module, name in records.SENT | records.NAMED_TUPLES:
        with pytest.raises(Refused, match=f"holds {module}.{name}"):
            read_plain(io.BytesIO(b"\x80\x04c" + f"{module}\n{name}\n".encode() + b"."))


def test_torchs_own_reader_of_plain_values_agrees(tmp_path: Path) -> None:
    """`weights_only`, with the list as its safe names, reads the same values; what it refuses, ours
    does.

    It knows protocol 2 alone, so it cannot read the files themselves.
    """
    from torch import _weights_only_unpickler

    safe = [records.class_of(*pair) for pair in records.RECORDS | records.ENUMS if not pair[0].startswith("vllm")]
    with torch.serialization.safe_globals([*safe, getattr, type(Path()), torch.serialization._get_layout]):
        for value in in_metadata():
            data = pickle.dumps(value, 2, fix_imports=False)
            assert _weights_only_unpickler.load(io.BytesIO(data)) == read_plain(io.BytesIO(data)) == value
    for value in attacks(tmp_path / "made").values():
        with contextlib.suppress(pickle.UnpicklingError, KeyError):
            data = pickle.dumps(value, 2, fix_imports=False)
            with pytest.raises((Refused, pickle.UnpicklingError, TypeError)):
                read_plain(io.BytesIO(data))
            _weights_only_unpickler.load(io.BytesIO(data))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_nothing_that_a_pickle_names_is_called(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    before = [dict(vars(member)) for member in WriteItemType]
    data = pickle.dumps(attacks(made)[name], 4)
    with pytest.raises((Refused, pickle.UnpicklingError, TypeError)):
        read_plain(io.BytesIO(data))
    assert not made.exists()
    assert [dict(vars(member)) for member in WriteItemType] == before


@pytest.mark.parametrize("name", ["Acts", "ActingError", "Config", "neighbour.Acts", "neighbour.Config"])
@pytest.mark.parametrize(
    "module", ["torch", "torch.distributed.checkpoint.metadata", "megatron.core.dist_checkpointing.mapping"]
)
def test_a_name_is_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str) -> None:
    """Modules hold the names of all that they import, and of what that imports."""
    made, here = tmp_path / "made", examples
    for word in ("Acts", "ActingError", "Config"):
        monkeypatch.setattr(sys.modules[module], word, getattr(here, word), raising=False)
    monkeypatch.setattr(sys.modules[module], "neighbour", here, raising=False)
    with pytest.raises(Refused, match=rf"holds {module}.{name},.*not on hpcrl's list.*\(not damage\)"):
        read_plain(io.BytesIO(by_name(module, name, str(made))))
    assert not made.exists()


@pytest.mark.parametrize("opcodes", [b"\x88\x85\x81", b"}b", b"N}\x86b", b"\x88\x85R", b"\x88a", b"\x88\x88s"])
@pytest.mark.parametrize("name", ["torch Size", "torch.distributed.checkpoint.metadata Metadata", "torch float32"])
def test_what_a_name_stands_for_is_handed_nothing(name: str, opcodes: bytes) -> None:
    """Neither a state, nor slots, nor items: it is there for the whole process."""
    module, word = name.split()
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        read_plain(io.BytesIO(b"\x80\x04c" + f"{module}\n{word}\n".encode() + opcodes + b"."))


def test_state_is_set_once() -> None:
    """A state is set once, and only by a record of this pickle."""
    name = b"\x80\x04ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81}\x8c"
    record = name + b"\x07load_idK\x01sb"
    assert vars(read_plain(io.BytesIO(record + b"."))) == {"load_id": 1}
    for more in (b"}\x8c\x01aK\x02sb.", b"N}b."):
        with pytest.raises(pickle.UnpicklingError):
            read_plain(io.BytesIO(record + more))
    with pytest.raises(pickle.UnpicklingError):
        read_plain(io.BytesIO(name + b"\x09__class__K\x01sb."))


def test_a_key_that_runs_deep_does_not_end_the_process() -> None:
    """Python hashes tuples within tuples until its stack is full, which is a small one here."""
    program = (
        "import io\nfrom hpcrl.pickles.reader import read_plain\nfor end in (b'Ns.', b'\\x91.', b'\\x90.'):\n    "
        "try:\n        read_plain(io.BytesIO(b'\\x80\\x04' + {b'N': b'}', b'\\x91': b'(', b'\\x90': b'\\x8f('}[end[:1]]"
        " + b')' + b'\\x85' * 30_000 + end))\n    except Exception as error:\n        print(type(error).__name__)\n"
    )
    small = ["bash", "-c", 'ulimit -s 1024; exec "$@"', "-", sys.executable, "-c"]
    done = subprocess.run([*small, program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["UnpicklingError"] * 3, done
    careless = program.replace("from hpcrl.pickles.reader import read_plain", "from pickle import load as read_plain")
    assert subprocess.run([*small, careless], capture_output=True, timeout=120).returncode < 0, "it is deep enough"


@settings(deadline=None, max_examples=int(os.environ.get("HPCRL_MUTATIONS", "300")))
@given(st.data())
def test_damaged_pickles_raise_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["change", "cut", "drop", "double"])):
            case "change":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[max(at, 1) :]
            case "drop":
                del whole[at : at + 1 if len(whole) > 1 else at]
            case "double":
                whole[at:at] = whole[at : at + 16]
    with contextlib.suppress(Exception):  # of whatever kind: the process goes on
        read_plain(io.BytesIO(bytes(whole)))


SAMPLES = [pickle.dumps(value, 4) for value in in_metadata()]


def test_a_checkpoints_metadata_is_not_obeyed(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "iter_0000001"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(attacks(made)["mkdir"]))
    with pytest.raises(DataError, match=r"\.metadata is not read: .* posix.mkdir, .* \(not damage\)"):
        TorchDist(path)
    assert not made.exists()
    good = Metadata({"rng": BytesStorageMetadata()}, storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(good))
    assert TorchDist(path).holds("rng")
