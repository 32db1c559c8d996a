"""Pickles of others: what is read, and that nothing that they name is called."""

from __future__ import annotations

import builtins
import contextlib
import enum
import io
import os
import pickle
import subprocess
import sys
import traceback
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from hpcrl.errors import DataError
from hpcrl.model_files.torch_dist import TorchDist
from hpcrl.pickles import reader
from hpcrl.pickles.reader import PlainUnpickler, read_plain
from hpcrl.pickles.values import Refused
from hpcrl.pickles.writer import PlainPickler, refuse_foreign_pickles


class Calls:
    """Pickled, a call of `what` with these arguments, and what it gives is handed `state` and `items`, if any."""

    def __init__(self, what: Callable[..., Any], *args: Any, state: Any = None, items: Any = None) -> None:
        self.call = (what, args, state, items)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@dataclass
class Acts:
    """As torch and its neighbours have them: a record that does something when it is made."""

    path: str

    def __post_init__(self) -> None:
        os.mkdir(self.path)


class ActingError(Exception):
    """Likewise an error."""

    def __init__(self, path: str) -> None:
        os.mkdir(path)


class Keyed(type):
    """As networkx has it: what runs the names of the arguments that it is called with."""

    def __call__(cls, path: str) -> None:
        exec(f"__import__('os').mkdir({path!r})")


class Config(metaclass=Keyed):
    """Likewise."""


def by_name(module: str, name: str, argument: str) -> bytes:
    """The pickle of a call of `module`.`name`, dots and all, with one text."""
    text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + text + b"\x93X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85R."


def attacks(made: Path) -> dict[str, Any]:
    """Each makes a directory when it is unpickled freely, or is a step on the way of one that does."""
    inner = io.BytesIO()
    torch.save(Calls(os.mkdir, str(made)), inner)
    dtype = Calls(np.dtype, "O", state=(3, "|", None, None, None, 8, 1, 0))
    return {
        "mkdir": Calls(os.mkdir, str(made)),
        "deep": {"plan": [(1, OrderedDict(a=Calls(os.mkdir, str(made))))]},
        "eval": Calls(builtins.eval, f"__import__('os').mkdir({str(made)!r})"),
        "exec": Calls(builtins.exec, f"open({str(made)!r}, 'w')"),
        "torch": Calls(torch.storage._load_from_bytes, inner.getvalue()),
        "torch.load": Calls(torch.load, io.BytesIO(inner.getvalue()), None, None),
        "hub": Calls(torch.hub.load, "x", "y"),
        "dataclass": Calls(Acts, str(made)),
        "error": Calls(ActingError, str(made)),
        "numpy dtype": dtype,
        "numpy scalar": Calls(np._core.multiarray.scalar, dtype, b"A" * 8),
        "numpy array": np.array([1, "x"], dtype=object),
        "factory": defaultdict(OrderedDict),
        "attribute": SimpleNamespace(check=OrderedDict),
        "getattr": Calls(getattr, WriteItemType, "mro"),
        "getattr, dotted": Calls(getattr, WriteItemType, "__class__.mro"),
        "getattr of os": Calls(getattr, OrderedDict, "fromkeys"),
        "new enumeration": Calls(WriteItemType, "Other", ["a"]),
        "state of a member": Calls(WriteItemType, 1, state={"_value_": 9}),
        "slots of a member": Calls(WriteItemType, 1, state=(None, {"_name_": "x"})),
        "state of a path": Calls(PurePosixPath, "a", state=(None, {"_str": "b"})),
        "record by call": Calls(Namespace),
        "file read by a stack": traceback.StackSummary.from_list([("/etc/hostname", 1, "f", None)])[0],
        "layout": Calls(torch.serialization._get_layout, "torch.nn"),
    }


def plain() -> list[Any]:
    """One of everything that may be sent or stored."""
    stack = traceback.extract_stack(limit=2)
    index = MetadataIndex("weight", torch.Size([0, 1]), 1)
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    written = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), size)
    shard = ShardedTensor("w", None, torch.float32, (2, 3), (4, 3), (0, 0), (2, 1), (0, 0, 1))
    return [
        {
            "a": [1, 2.5, "x", b"y", None, True, (1, 2)],
            3: {4},
            "r": range(3),
            "s": slice(1, None),
            ("k", (1, 2)): frozenset({5}),
        },
        [1j, bytearray(b"ab"), OrderedDict(a=1), Path("/a/b"), PurePosixPath("c"), 1 << 100, -(1 << 40)],
        OrderedDict(a=torch.float32, b=size, c=torch.strided),
        [getattr(torch, name) for name in sorted(reader.DTYPES)],
        [
            torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.ones(2, 3).t(),
        ],
        [np.arange(4, dtype=np.float32), np.float64(1.5), np.int64(3), np.zeros((0, 2), np.int8)],
        np.random.get_state(),
        Namespace(a=1, dtype=torch.bfloat16),
        Metadata(
            {
                "weight": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [chunk]),
                "rng": BytesStorageMetadata(),
            },
            planner_data={"weight": ("model", "weight")},
            storage_data={index: _StorageInfo("__0_0.distcp", 0, 10)},
            storage_meta=StorageMeta(Path("/a"), "id"),
        ),
        OldProperties(dtype=torch.float16),
        SavePlan(
            [
                WriteItem(index, WriteItemType.SHARD, None, written),
                WriteItem(index, WriteItemType.BYTE_IO, BytesIOWriteData(3)),
            ]
        ),
        LoadPlan([ReadItem(LoadItemType.TENSOR, index, torch.Size([0]), index, torch.Size([0]), size)]),
        WriteResult(index, 10, _StorageInfo("__0_0.distcp", 0, 10)),
        [shard, ShardedObject("rng", None, (1,), (0,), 0)],
        [RuntimeError("disk full"), stack],
        CheckpointException("write", {1: (OSError("disk full"), stack)}),
    ]


def dumped(value: Any) -> bytes:
    """As torch's object collectives send it in our ranks."""
    stream = io.BytesIO()
    PlainPickler(stream).dump(value)
    return stream.getvalue()


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, attributes and classes included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and not isinstance(one, traceback.StackSummary):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseException):
        return str(one) == str(other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return (
        same(sorted(vars(one).items()), sorted(vars(other).items())) if isinstance(one, ShardedTensor) else one == other
    )


class Notes(PlainUnpickler):
    """Which names were looked up."""

    seen: set[tuple[str, str]]

    def find_class(self, module: str, name: str) -> Any:
        self.seen.add((module, name))
        return super().find_class(module, name)


def test_every_name_on_the_list_is_read_as_it_was_sent() -> None:
    Notes.seen = set()
    for value in plain():
        found = Notes(io.BytesIO(dumped(value))).load()
        assert same(value, found), (value, found)
    stream = Notes(io.BytesIO(dumped(io.BytesIO(b"state")))).load()
    assert stream.getvalue() == b"state"
    Notes(io.BytesIO(as_python_3_11_2(LoadItemType.TENSOR))).load()
    listed = reader.RECORDS | reader.ENUMS | set(reader.MAKERS) | {("torch", name) for name in reader.DTYPES}
    assert Notes.seen == listed


def test_checkpoint_pickles_are_read() -> None:
    """As torch writes .metadata; random-number states are not in it."""
    metadata = next(value for value in plain() if isinstance(value, Metadata))
    for protocol in (4, 5):
        assert read_plain(io.BytesIO(pickle.dumps(metadata, protocol))) == metadata


def as_python_3_11_2(value: Any) -> bytes:
    """Pickled as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    class Older(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    stream = io.BytesIO()
    Older(stream, 4).dump(value)
    return stream.getvalue()


def test_enum_members_of_every_python() -> None:
    """Enum members are read as every Python writes them."""
    for value in plain()[8:13]:
        assert read_plain(io.BytesIO(as_python_3_11_2(value))) == value


def test_errors_of_other_ranks(tmp_path: Path) -> None:
    """Errors of other ranks keep their text and run nothing."""
    made = tmp_path / "made"
    error = ActingError.__new__(ActingError, str(made))
    found = read_plain(io.BytesIO(dumped(error)))
    assert type(found) is RuntimeError and str(found) == f"{__name__}.ActingError: {made}"
    assert not made.exists()
    full = OSError(28, "No space left on device")
    assert str(read_plain(io.BytesIO(dumped(full)))) == "[Errno 28] No space left on device"


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
    made, here = tmp_path / "made", sys.modules[__name__]
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
    record = b"\x80\x04cargparse\nNamespace\n)\x81}\x8c\x01aK\x01sb"
    assert read_plain(io.BytesIO(record + b".")) == Namespace(a=1)
    for more in (b"}\x8c\x01aK\x02sb.", b"N}b."):
        with pytest.raises(pickle.UnpicklingError):
            read_plain(io.BytesIO(record + more))
    with pytest.raises(pickle.UnpicklingError):
        read_plain(io.BytesIO(b"\x80\x04cargparse\nNamespace\n)\x81}\x8c\x09__class__K\x01sb."))


def test_a_key_that_runs_deep_does_not_end_the_process() -> None:
    """Python hashes tuples within tuples until its stack is full."""
    program = (
        "import io\nfrom hpcrl.pickles.reader import read_plain\nfor end in (b'Ns.', b'\\x91.', b'\\x90.'):\n    "
        "try:\n        read_plain(io.BytesIO(b'\\x80\\x04' + {b'N': b'}', b'\\x91': b'(', b'\\x90': b'\\x8f('}[end[:1]]"
        " + b')' + b'\\x85' * 300_000 + end))\n    except Exception as error:\n        print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["UnpicklingError"] * 3, done


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


SAMPLES = [dumped(value) for value in plain()]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    monkeypatch.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchs_object_collectives_do_not_obey(alone: None, tmp_path: Path) -> None:
    made, found = tmp_path / "made", [None]
    refuse_foreign_pickles()
    dist.all_gather_object(found, {"plain": torch.ones(2)})
    assert torch.equal(found[0]["plain"], torch.ones(2))
    with pytest.raises(Refused, match="holds posix.mkdir,.*not on hpcrl's list"):
        dist.all_gather_object(found, Calls(os.mkdir, str(made)))
    assert not made.exists()


def test_a_checkpoints_metadata_is_not_obeyed(tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "iter_0000001"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Calls(os.mkdir, str(made))))
    with pytest.raises(DataError, match=r"\.metadata is not read: .* posix.mkdir, .* \(not damage\)"):
        TorchDist(path)
    assert not made.exists()
    good = Metadata({"rng": BytesStorageMetadata()}, storage_data={})
    (path / ".metadata").write_bytes(pickle.dumps(good))
    assert TorchDist(path).holds("rng")
