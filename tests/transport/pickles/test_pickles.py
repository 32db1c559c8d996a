"""Pickles of others: every listed value arrives as it was, and nothing that a pickle names is called."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import io
import os
import pickle
import resource
import sys
import traceback
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

from hpcrl.errors import DataError
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.transport.pickles import plain, records
from hpcrl.transport.pickles.plain import MAKERS, PlainUnpickler, dumps, loads, look_up
from hpcrl.transport.pickles.values import Refused
from tests.transport.pickles import examples
from tests.transport.pickles.examples import ActingError, as_python_3_11_2, attacks, by_name, in_metadata, same

#: attacks that come to a plain value of this pickle alone
HARMLESS = {"state of a path": PurePosixPath, "record by call": Namespace}


class Notes(PlainUnpickler):
    """Which names were looked up."""

    seen: set[tuple[str, str]]

    def find_class(self, module: str, name: str) -> Any:
        self.seen.add((module, name))
        return super().find_class(module, name)


# ---- what arrives


def test_every_listed_value_arrives_as_it_was_sent() -> None:
    Notes.seen = set()
    values = [*examples.plain(), io.BytesIO(b"state"), "\udc80 of a path", "é"]
    for value in values:
        found = Notes(io.BytesIO(dumps(value))).load()
        if isinstance(value, io.BytesIO):
            assert found.getvalue() == value.getvalue()
        else:
            assert same(value, found), (value, found)
    assert Notes.seen >= records.RECORDS | records.ENUMS


def test_metadata_is_read_as_every_writer_writes_it() -> None:
    """Protocols 4 and 5, and enumerations as Debian 12's Python pickles them."""
    for value in in_metadata():
        for data in (pickle.dumps(value, 4), pickle.dumps(value, 5), as_python_3_11_2(value)):
            assert loads(data) == value


def test_tensors_as_torch_pickles_them() -> None:
    for tensor in (torch.arange(6.0).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 3)):
        assert same(tensor, loads(pickle.dumps(tensor)))


def test_tensors_of_every_kind_of_numbers() -> None:
    for name in records.DTYPES:
        whole = torch.arange(32, dtype=torch.uint8).view(getattr(torch, name))
        found = loads(dumps({"a": whole[:1]}))["a"]
        assert found.dtype == whole.dtype
        assert torch.equal(found.view(torch.uint8), whole[:1].view(torch.uint8))


def test_containers_with_more_than_values_arrive_plain() -> None:
    """A default's maker is a program, and a deque's length no value."""
    assert loads(dumps(defaultdict(list, a=[1]))) == {"a": [1]}
    assert type(loads(dumps(defaultdict(list)))) is dict
    assert loads(dumps(deque([1, 2], 5))) == [1, 2]


def test_errors_of_other_ranks(tmp_path: Path) -> None:
    """They keep their text, and their class where it is one of Python's own; a stack is not read from files."""
    made = tmp_path / "made"
    full = loads(dumps(OSError(28, "No space left on device")))
    assert (type(full), str(full)) == (OSError, "[Errno 28] No space left on device")
    stack = traceback.StackSummary.from_list([("/etc/hostname", 1, "f", None)])
    found = loads(dumps(stack))[0]
    assert (found.filename, found._line) == ("/etc/hostname", stack[0].line)
    error = ActingError.__new__(ActingError, str(made))
    assert str(loads(dumps(error))) == f"tests.transport.pickles.examples.ActingError: {made}"
    assert not made.exists()


def test_flashinfers_handle_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 64),)

    module = ModuleType(records.IPC_HANDLE[0])
    Handle.__module__, Handle.__name__, Handle.__qualname__ = module.__name__, *2 * (records.IPC_HANDLE[1],)
    setattr(module, Handle.__name__, Handle)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = loads(dumps([Handle.from_buffer_copy(bytes(range(64)))]))[0]
    assert (type(found), bytes(found)) == (Handle, bytes(range(64)))
    with pytest.raises(pickle.UnpicklingError):
        loads(pickle.dumps(examples.Calls(plain.values.ipc_handle_from, b"short")))


def test_an_unlisted_value_is_refused() -> None:
    for value in (examples.Acts.__new__(examples.Acts), examples.Acts, os.mkdir, torch.randn(2).to_sparse()):
        with pytest.raises(Refused, match="not on hpcrl's list"):
            loads(dumps({"a": [value]}))


# ---- what does not


@pytest.mark.parametrize("name", attacks(Path("x")))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_that_a_pickle_names_is_called(name: str, protocol: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    before = [dict(vars(member)) for member in WriteItemType]
    data = pickle.dumps(attacks(made)[name], protocol)
    if name in HARMLESS:
        assert type(loads(data)) is HARMLESS[name]
    else:
        with pytest.raises((Refused, pickle.UnpicklingError, TypeError, ValueError, KeyError)):
            loads(data)
    assert not made.exists()
    assert [dict(vars(member)) for member in WriteItemType] == before


def test_a_member_is_changed_by_no_pickle() -> None:
    """Neither by its value nor by its name (as Debian 12's Python has it), with attributes or slots."""
    name = b"\x80\x04c" + f"{records.CHECKPOINT}planner\nLoadItemType\n".encode()
    by_value = name + b"K\x01\x85R"
    by_attribute = b"\x80\x04cbuiltins\ngetattr\n" + name[2:] + b"\x8c\x06TENSOR\x86R"
    before = {member: dict(vars(member)) for member in LoadItemType}
    for member in (by_value, by_attribute):
        assert loads(member + b".") in before
        for state in (b"}\x8c\x07_value_K\x09s", b"N}\x8c\x07_value_K\x09s\x86"):
            with pytest.raises(TypeError):
                loads(member + state + b"b.")
    assert {member: dict(vars(member)) for member in LoadItemType} == before


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
        loads(by_name(module, name, str(made)))
    assert not made.exists()


OPCODES = [b"}\x8c\x01aK\x02sb", b"N}\x8c\x07__new__K\x01s\x86b", b"\x88a", b"(\x88e", b"\x88\x88s"]


@pytest.mark.parametrize("opcodes", [*OPCODES, b"(\x88\x90", b"\x88\x85}\x8c\x01aK\x01s\x92"])
@pytest.mark.parametrize("name", ["torch Size", "torch.distributed.checkpoint.metadata Metadata", "torch float32"])
def test_what_a_name_stands_for_is_handed_nothing(name: str, opcodes: bytes) -> None:
    """Neither a state, nor slots, items or named arguments: it is there for the whole process."""
    module, word = name.split()
    before = dict(vars(look_up(module, word))) if word != "float32" else None
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
        loads(b"\x80\x04c" + f"{module}\n{word}\n".encode() + opcodes + b".")
    assert word == "float32" or dict(vars(look_up(module, word))) == before


@pytest.mark.parametrize(
    "data",
    [
        b"(S'mkdir'\niposix\nmkdir\n.",
        b"(cposix\nmkdir\nS'a'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02\x84\x01\x00\x00\x00.",
        b"Pname\n.",
        b"K\x01Q.",
        b"\x80\x05\x97.",
    ],
    ids=["INST", "OBJ", "EXT1", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER"],
)
def test_other_opcodes_lead_nowhere(data: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        loads(data)


def test_torchs_own_reader_of_plain_values_agrees(tmp_path: Path) -> None:
    """`weights_only`, with the list as its safe names, reads the same values; what it refuses, ours does.

    It knows protocol 2 alone, so it cannot read the files themselves.
    """
    from torch import _weights_only_unpickler

    safe = [plain._class(pair) for pair in records.RECORDS | records.ENUMS]
    with torch.serialization.safe_globals([*safe, getattr, type(Path()), torch.serialization._get_layout]):
        for value in in_metadata():
            data = pickle.dumps(value, 2, fix_imports=False)
            assert _weights_only_unpickler.load(io.BytesIO(data)) == loads(data) == value


@pytest.mark.parametrize("through_modules", [False, pytest.param(True, marks=pytest.mark.process)])
def test_no_other_name_that_can_be_reached_is_found(through_modules: bool) -> None:
    """Over all that torch, Megatron-core, numpy and Python have loaded, by every name that leads there; names of a module
    within a module, of which there are millions, in those that have a listed name, and in the second layer in all."""
    allowed = records.RECORDS | records.ENUMS | set(MAKERS) | {("torch", name) for name in records.DTYPES}
    allowed |= records.ENGINE_RECORDS | records.ENGINE_ENUMS | records.ENGINE_TUPLES
    tried, listed = 0, {module for module, _ in allowed}
    for module, loaded in list(sys.modules.items()):
        for name in names_in(loaded, through_modules or module in listed):
            tried += 1
            if (module, name) not in allowed and not is_refused(module, name):
                raise AssertionError(f"{module} {name}")
    assert tried > 50_000


def is_refused(module: str, name: str) -> bool:
    try:
        look_up(module, name)
    except Refused:
        return True
    return False


def names_in(module: ModuleType, through_modules: bool) -> Iterator[str]:
    """Every name of a module, and of its classes (and modules) by a dot."""
    kinds = (type, ModuleType) if through_modules else (type,)
    for name, value in list(getattr(module, "__dict__", {}).items()):
        yield name
        if isinstance(value, kinds):
            yield from (f"{name}.{inner}" for inner in list(vars(value)))


def test_listed_classes_do_nothing_when_filled() -> None:
    """No listed class has a `__new__`, `__del__` or attribute hook of its own, so that a record which is made empty, and
    whose attributes go into its `__dict__`, runs nothing, whatever it is filled with.

    `TensorProperties` has a `__setstate__`, which takes five plain values.
    """
    for pair in sorted(records.RECORDS):
        kind: Any = plain._class(pair)
        assert is_dataclass(kind) or kind is Namespace
        runs = {"__new__", "__del__", "__getattr__", "__getattribute__", "__init_subclass__", "__set_name__"}
        runs |= set() if pair[1] == "TensorProperties" else {"__setstate__"}
        for base in kind.__mro__[:-1]:
            assert not runs & set(vars(base)), kind


# ---- damage

SAMPLES = [dumps(value) for value in examples.plain()] + [pickle.dumps(value, 4) for value in in_metadata()]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than 2 GiB beside what is there: Python's unpickler makes room for as many memos as a pickle counts."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@settings(
    deadline=None,
    max_examples=int(os.environ.get("HPCRL_MUTATIONS", "300")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
    before = [dict(vars(member)) for kind in (WriteItemType, LoadItemType) for member in kind]
    with contextlib.suppress(Exception):  # of whatever kind: the process goes on
        loads(bytes(whole))
    assert [dict(vars(member)) for kind in (WriteItemType, LoadItemType) for member in kind] == before


def test_a_count_of_memos_takes_no_memory(little_memory: None) -> None:
    with pytest.raises(MemoryError):
        loads(b"\x80\x04Nr\xff\xff\xff\x7f.")


def test_no_listed_value_can_be_called() -> None:
    for value in examples.plain():
        assert not list(callables(loads(dumps(value))))


def callables(value: Any, depth: int = 0) -> Iterator[Any]:
    """What can be called in a value, however deep."""
    if callable(value):
        yield value
    if depth > 20 or isinstance(value, enum.Enum):
        return
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from callables(part, depth + 1)


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
    assert loads(pickle.dumps(OrderedDict(a=1))) == OrderedDict(a=1)
