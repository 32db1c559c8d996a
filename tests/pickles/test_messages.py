"""What ranks send one another: every listed value arrives as it was, and nothing else comes of any bytes."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import sys
import traceback
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from hpcrl.errors import HpcrlError
from hpcrl.pickles import messages, records
from hpcrl.pickles.messages import MOST_DEEP, MessageReader
from hpcrl.pickles.reader import MAKERS, look_up
from hpcrl.pickles.torch_patches import refuse_foreign_pickles, refuse_foreign_pickles_of_vllm
from hpcrl.pickles.values import Refused
from tests.pickles.examples import ActingError, Acts, attacks, dumped, plain, same


def received(value: Any) -> Any:
    """`value`, as another rank reads it."""
    return MessageReader(io.BytesIO(dumped(value))).load()


def read(*node: Any) -> Any:
    """What a message that holds this comes to."""
    return MessageReader(io.BytesIO(msgspec.msgpack.encode(node))).load()


def tags_in(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        yield node[0]
        for part in node[1:] if node[0] in messages.NESTED else ():
            yield from tags_in(part)


def test_every_listed_value_arrives_as_it_was_sent() -> None:
    values = [*plain(), io.BytesIO(b"state"), "\udc80 of a path", "é"]
    for value in values:
        found = received(value)
        if isinstance(value, io.BytesIO):
            assert found.getvalue() == value.getvalue()
        else:
            assert same(value, found), (value, found)
    sent = {tag for value in values for tag in tags_in(messages.encode(value))}
    assert sent == set(messages.TAGS) - {"named tuple", "unlisted"}
    listed = {messages.LISTED[node[1]] for value in values for node in numbered(messages.encode(value))}
    assert listed == (records.FILLED | records.ENUMS) - {QUEUE}


QUEUE = ("vllm.distributed.device_communicators.shm_broadcast", "Handle")


def numbered(node: Any) -> Iterator[list[Any]]:
    """Every part that has the number of a class."""
    if isinstance(node, list):
        if node[0] in ("record", "enum", "named tuple"):
            yield node
        for part in node[1:] if node[0] in messages.NESTED else ():
            yield from numbered(part)


def test_containers_with_more_than_values_arrive_plain() -> None:
    """A default's maker is a program, and a deque's length no value."""
    assert received(defaultdict(list, a=[1])) == {"a": [1]} and type(received(defaultdict(list))) is dict
    assert received(deque([1, 2], 5)) == [1, 2]


@pytest.mark.vllm
def test_what_workers_of_an_engine_send() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import Handle
    from vllm.distributed.parallel_state import TensorMetadata

    for value in (Handle([1], (1, 2, 3, "psm"), "ipc://a"), TensorMetadata("cpu", torch.bfloat16, torch.Size([2]))):
        assert received([("x", value)]) == [("x", value)]
        assert type(received(value)) is type(value)


@pytest.mark.vllm
def test_what_vllm_pickles_by_itself(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Objects that it sends over its own groups and stores are messages, and pickles in their place are not run."""
    from vllm.distributed import parallel_state, utils

    for module in (parallel_state, utils):
        monkeypatch.setattr(module, "pickle", module.pickle)
    refuse_foreign_pickles_of_vllm()
    made = tmp_path / "made"
    for module in (parallel_state, utils):
        metadata = [("x", parallel_state.TensorMetadata("cpu", torch.float32, torch.Size([2]))), ("step", 3)]
        assert module.pickle.loads(module.pickle.dumps(metadata)) == metadata
        with pytest.raises(pickle.UnpicklingError):
            module.pickle.loads(pickle.dumps(attacks(made)["mkdir"]))
    assert not made.exists()


def test_an_unlisted_value_is_refused_by_all(tmp_path: Path) -> None:
    """It is written as its name, so that the collective ends alike on all ranks; nothing of it is called."""
    made = tmp_path / "made"
    acts = Acts.__new__(Acts)
    for value in (acts, Acts, os.mkdir, object(), lambda: None, torch.nn.Linear, torch.randn(2).to_sparse()):
        with pytest.raises(Refused, match="not on hpcrl's list"):
            received({"a": [value]})
    error = ActingError.__new__(ActingError, str(made))
    assert str(received(error)) == f"tests.pickles.examples.ActingError: {made}"
    assert not made.exists()


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    """The pickles of the attacks are read as damaged messages."""
    made = tmp_path / "made"
    for value in attacks(made).values():
        with pytest.raises(pickle.UnpicklingError):
            MessageReader(io.BytesIO(pickle.dumps(value, 4))).load()
    assert not made.exists()


LIES: list[tuple[Any, ...]] = [
    (),
    ("nothing",),
    ("list", ["os.mkdir", "x"]),
    ("dict", "a"),
    ("dict", ["list"], 1),
    ("set", ["dict"]),
    ("tensor", b"abc", "float32", 1),
    ("tensor", b"", "float32", -1),
    ("tensor", b"abcd", "nn", 1),
    ("tensor",),
    ("array", b"12345678", "|O", 1),
    ("array", b"12345678", "O8", 1),
    ("array", b"12345678", "<f8", 1 << 62, 1 << 62),
    ("dtype", "nn"),
    ("dtype", "os.system"),
    ("layout", "torch.nn"),
    ("layout", "nn"),
    ("device", "privateuseone"),
    ("device", "cuda:99999"),
    ("size", -1),
    ("range", 1, 2, 0),
    ("slice", "a", "b", "c"),
    ("complex", 1, 2),
    ("int", "9" * 5000),
    ("int", "0x10"),
    ("bytearray", 1 << 40),
    ("stream", 5),
    ("path", "text"),
    ("error", ["list"], "x"),
    ("stack", ["list", 1]),
    ("stack", ["/etc/hostname", 1, "f", None]),
    ("record", "argparse", "Namespace"),
    ("record", -1, ["dict"]),
    ("record", len(messages.LISTED), ["dict"]),
    ("record", messages.NUMBERS["argparse", "Namespace"], 5),
    ("record", messages.NUMBERS["argparse", "Namespace"], ["dict", "__class__", 1]),
    ("record", messages.NUMBERS["argparse", "Namespace"], ["dict", 1, 1]),
    ("record", messages.NUMBERS[records.METADATA, "MetadataIndex"], ["dict", "fqn", ["list"]]),
    ("record", messages.NUMBERS[records.METADATA, "TensorProperties"], ["dict", "dtype", 1]),
    ("record", messages.NUMBERS[records.METADATA, "_MEM_FORMAT_ENCODING"], ["dict"]),
    ("enum", messages.NUMBERS["argparse", "Namespace"], 1),
    ("enum", messages.NUMBERS[records.METADATA, "_MEM_FORMAT_ENCODING"], 77),
    ("enum", messages.NUMBERS[records.METADATA, "_MEM_FORMAT_ENCODING"], ["list"]),
    ("named tuple", messages.NUMBERS["argparse", "Namespace"], 1),
    ("checkpoint exception", "x", ["dict", 1, ["tuple", 1, 2]]),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:30])
def test_a_message_with_other_parts_is_refused(lie: tuple[Any, ...]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read(*lie)


def test_depth_is_bounded() -> None:
    deep: Any = 1
    for _ in range(MOST_DEEP + 1):
        deep = [deep]
    with pytest.raises(pickle.UnpicklingError, match="deep"):
        dumped(deep)
    within: list[Any] = []
    within.append(within)
    with pytest.raises(pickle.UnpicklingError, match="deep"):
        dumped(within)
    many = b"\x92\xa4list" * 100_000 + b"\x01"
    with pytest.raises(pickle.UnpicklingError):
        MessageReader(io.BytesIO(many)).load()


SAMPLES = [dumped(value) for value in plain()]


@settings(deadline=None, max_examples=int(os.environ.get("HPCRL_MUTATIONS", "300")))
@given(st.data())
def test_damaged_messages_raise_one_error(data: st.DataObject) -> None:
    """Whatever the bytes: UnpicklingError, or values none of which can be called."""
    whole = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["change", "cut", "double"])):
            case "change":
                whole[at] = data.draw(st.integers(0, 255))
            case "cut":
                del whole[max(at, 1) :]
            case "double":
                whole[at:at] = whole[at : at + 16]
    with contextlib.suppress(pickle.UnpicklingError):
        assert not list(callables(MessageReader(io.BytesIO(bytes(whole))).load()))


def test_no_listed_value_can_be_called() -> None:
    for value in plain():
        assert not list(callables(received(value)))


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


@pytest.mark.parametrize("through_modules", [False, pytest.param(True, marks=pytest.mark.process)])
def test_no_other_name_that_can_be_reached_is_found(through_modules: bool) -> None:
    """Over all that torch, Megatron-core, numpy and Python have loaded, by every name that leads there; names of a module
    within a module, of which there are millions, in those that have a listed name, and in the second layer in all."""
    allowed = records.RECORDS | records.ENUMS | set(MAKERS)
    allowed |= {("torch", name) for name in records.DTYPES}
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
    """No listed class has a `__new__`, `__del__` or attribute hook of its own: a record that is made empty, and whose
    attributes go into its `__dict__`, runs nothing, whatever it is filled with."""
    for module, name in sorted(records.FILLED - {QUEUE}):
        kind = records.class_of(module, name)
        assert is_dataclass(kind) or kind is Namespace
        for base in kind.__mro__[:-1]:
            own = vars(base)
            for method in (
                "__new__",
                "__del__",
                "__getattr__",
                "__getattribute__",
                "__init_subclass__",
                "__set_name__",
            ):
                assert method not in own, (kind, method)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, and torch as it was afterwards."""
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint import filesystem

    for module, name in ((distributed_c10d, "_unpickler"), (distributed_c10d, "_pickler"), (filesystem, "pickle")):
        monkeypatch.setattr(module, name, getattr(module, name))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchs_object_collectives_send_messages(alone: None, tmp_path: Path) -> None:
    """What has no place in one is refused, and a pickle in its place is not obeyed."""
    from torch.distributed import distributed_c10d

    made, found = tmp_path / "made", [None]
    refuse_foreign_pickles()
    dist.all_gather_object(found, {"plain": torch.ones(2)})
    assert torch.equal(found[0]["plain"], torch.ones(2))
    with pytest.raises(Refused, match="not on hpcrl's list"):
        dist.all_gather_object(found, attacks(made)["mkdir"])
    data = torch.frombuffer(bytearray(pickle.dumps(attacks(made)["mkdir"])), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        distributed_c10d._tensor_to_object(data, data.numel(), None)
    assert not made.exists()


def test_torch_does_not_unpickle_metadata(alone: None, tmp_path: Path) -> None:
    """Its own reader of checkpoints, which Megatron-core's is made from, is handed plain values."""
    from torch.distributed.checkpoint import FileSystemReader

    made = tmp_path / "made"
    refuse_foreign_pickles()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(attacks(made)["mkdir"]))
    with pytest.raises(Refused, match=r"posix\.mkdir"):
        FileSystemReader(tmp_path).read_metadata()
    assert not made.exists()
    good = next(value for value in plain() if isinstance(value, Metadata))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(good))
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata == good.state_dict_metadata


def test_a_torch_without_these_places_is_refused(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    from torch.distributed import distributed_c10d

    monkeypatch.delattr(distributed_c10d, "_unpickler")
    with pytest.raises(HpcrlError, match="_unpickler"):
        refuse_foreign_pickles()


def test_errors_of_other_ranks() -> None:
    """They keep their text, and their class where it is one of Python's own; a stack is not read from files."""
    full = OSError(28, "No space left on device")
    assert str(received(full)) == "[Errno 28] No space left on device"
    stack = traceback.StackSummary.from_list([("/etc/hostname", 1, "f", None)])
    assert received(stack)[0].filename == "/etc/hostname"
