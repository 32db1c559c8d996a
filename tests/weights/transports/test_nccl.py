"""The sender's side of NCCL without a GPU: what vLLM is handed, in which order, and that no wait is for ever.

What the streams of a GPU do only a GPU can show; here CUDA and vLLM's broadcast are stand-ins that take notes.
"""

from __future__ import annotations

import base64
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.weights.transports import Link, nccl
from hpcrl.weights.transports.nccl import NcclTransport, on_this_device, wait_for_gpu


class Pending:
    """A call under way; error: what `check` raises from the third look on."""

    def __init__(self, notes: list[Any], error: Exception | None = None) -> None:
        self.notes = notes
        self.error = error
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.error and self.looks > 2:
            raise self.error

    def results(self) -> list[Any]:
        self.notes.append("answered")
        return []


class EngineBroadcast:
    engines = ("engine-0", "engine-1")

    def __init__(self, notes: list[Any], error: Exception | None = None) -> None:
        self.notes = notes
        self.error = error

    def begin(self, phase: str, path: str, bodies: list[Any]) -> Pending:
        self.notes.append((path, bodies))
        return Pending(self.notes, self.error)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with GPUs, of which this thread has number 3; an event is reached at the third question."""
    found: list[Any] = []
    current = threading.local()

    class Event:
        asked = 0

        def record(self) -> None:
            found.append("recorded")

        def query(self) -> bool:
            self.asked += 1
            if done := self.asked > 2:
                found.append("reached")
            return done

    def producer(iterator: Any, group: Any, src: int, **how: Any) -> None:
        found.append(("broadcast", [name for name, _ in iterator], group, src, how["num_buffers"], current.device))

    module = types.ModuleType("packed_tensor")
    module.packed_nccl_broadcast_producer = producer
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.packed_tensor", module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return found


def transport(notes: list[Any], error: Exception | None = None) -> NcclTransport:
    made = NcclTransport(Link(EngineBroadcast(notes, error), 1000, "10.0.0.1", [1, 1]))
    made.group = "group"
    made.stage(iter([("a", torch.zeros(20)), ("b", torch.zeros(4)), ("c", torch.zeros(300))]), 1)
    return made


def test_a_bucket_is_complete_before_vllm_copies_it(notes: list[Any]) -> None:
    sent = transport(notes)
    sent.send()
    steps = [step if isinstance(step, str) else step[0] for step in notes]
    assert steps == 2 * ["/update_weights", "recorded", "reached", "broadcast", "answered"]
    assert [step for step in notes if step[0] == "broadcast"] == [
        ("broadcast", ["a", "b"], "group", 0, 2, 3),  # on this rank's GPU, not the first, where a new thread begins
        ("broadcast", ["c"], "group", 0, 2, 3),
    ]
    (info, again) = notes[0][1]
    assert info == again
    assert info["update_info"] == {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[20], [4]]}
    assert sent.bytes == 324 * 4


@pytest.mark.parametrize("error", [PeerError("engine-1 died"), DeadlineError("engine-0 is late")])
def test_a_gpu_that_never_gets_there_is_not_waited_for(
    notes: list[Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)
    begun = time.monotonic()
    with pytest.raises(type(error), match=str(error)):
        wait_for_gpu(Pending(notes, error))
    assert time.monotonic() - begun < 1


def test_broadcast_that_an_engine_left(notes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast that an engine has left is not waited for."""
    stuck = threading.Event()
    module: Any = sys.modules["vllm.distributed.weight_transfer.packed_tensor"]
    monkeypatch.setattr(module, "packed_nccl_broadcast_producer", lambda **_: stuck.wait(60))
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: True)
    begun = time.monotonic()
    with pytest.raises(PeerError, match="engine-0 answered 500"):
        transport(notes, PeerError("engine-0 answered 500")).send()
    stuck.set()
    assert time.monotonic() - begun < 10


def test_packing_is_agreed_at_the_start(notes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing is agreed on with the engines at the start."""
    module = types.ModuleType("nccl_common")
    module.uid_init_process_group = lambda name, rank, world, device: ("group of", name, rank, world, device)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", module)
    monkeypatch.setattr(nccl, "unique_id", lambda: b"\0\xff" * 64)
    made = NcclTransport(Link(EngineBroadcast(notes), 1000, "10.0.0.1", [2, 1]))
    made.connect()
    assert made.group == ("group of", b"\0\xff" * 64, 0, 4, 3)
    common = {"nccl_unique_id_b64": base64.b64encode(b"\0\xff" * 64).decode(), "world_size": 4}
    packing = {"packed": True, "packed_buffer_size_bytes": 1000, "packed_num_buffers": 2}
    path, bodies = notes[0]
    assert path == "/init_weight_transfer_engine"
    assert bodies == [{"init_info": common | packing | {"rank_offset": offset}} for offset in (1, 3)]


def test_what_vllm_is_handed_it_takes() -> None:
    """The names of its arguments and of its init's fields, in the vLLM that is installed."""
    import dataclasses
    import inspect

    common = pytest.importorskip("vllm.distributed.weight_transfer.nccl_common")
    packed = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    asked = {"iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers"}
    assert asked <= set(inspect.signature(packed.packed_nccl_broadcast_producer).parameters)
    fields = {field.name for field in dataclasses.fields(common.NCCLWeightTransferInitInfo)}
    assert {
        "nccl_unique_id_b64",
        "rank_offset",
        "world_size",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
    } <= fields
    assert list(inspect.signature(common.uid_init_process_group).parameters)[1:] == ["rank", "world_size", "device"]
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    assert len(bytes(memoryview(wrapper.ncclUniqueId().internal))) == 128


def test_work_of_another_thread_is_on_the_same_gpu(notes: list[Any]) -> None:
    work: Callable[[], Any] = on_this_device(lambda: "done")
    assert work() == "done"
