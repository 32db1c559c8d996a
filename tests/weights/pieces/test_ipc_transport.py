"""--weight-transfer ipc between real processes, with memory of the host in the place of a GPU's; and CUDA's calls on a
stand-in in C."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.engine.pieces.part_tensor import PartTensor
from hpcrl.errors import DeadlineError, PeerError, UsageError
from hpcrl.plan import Host, make_plan
from hpcrl.transport.torch_store import open_store
from hpcrl.weights.comparison import cut, digest
from hpcrl.weights.pieces.device_memory import NAME_BYTES, HostMemory, Runtime, tensor_at
from hpcrl.weights.pieces.ipc_transport import ExportedMemory, IpcTransport, read_exported
from hpcrl.weights.pieces.peer_transport import Transfer, join_group
from hpcrl.weights.pieces.piece_update import _check_hosts
from hpcrl.weights.pieces.wire import DATA, DONE, READY
from hpcrl.weights.redistribution.layouts import Worker
from hpcrl.weights.redistribution.plan import redistribute
from hpcrl.weights.update_backend import backend
from tests.support.able import needs
from tests.support.layouts import Case, random_case
from tests.support.ranks import run_ranks
from tests.weights.pieces.test_pieces import HERE, boxes_of, closed, members, rank_side, simple, worker_side  # noqa: F401

UPDATES = 2


class Later:
    """What a device that takes its time was given."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.seen = False
        self.told: list[int] = []  # who heard of it

    def query(self) -> bool:
        self.seen = self.seen or time.monotonic() > self.end
        return self.seen


class SlowMemory(HostMemory):
    """As of a device that works on after a call has returned."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.last = Later(0.0)
        self.opens = 0
        self.made = 0

    def mark(self) -> Later:
        self.last = Later(self.seconds)
        return self.last

    def allocate(self, size: int) -> Any:
        self.made += 1
        return super().allocate(size)

    def open(self, name: bytes, size: int, place: str) -> Any:
        self.opens += 1
        return super().open(name, size, place)


class WatchedPost(IpcTransport):
    """Refuses to say that something is ready or done, to each member once, before the device has ended it."""

    def tell(self, to: int, tag: int) -> Transfer:
        assert isinstance(self.exported_memory.memory, SlowMemory)
        last = self.exported_memory.memory.last
        assert last.seen and to not in last.told and tag in (READY, DONE)
        last.told.append(to)
        return super().tell(to, tag)


def one_host(family: str) -> tuple[Case, Any]:
    """A layout of both sides, the same in every process that asks."""
    chance = Random(f"ipc {family}")
    case = random_case(family, chance)
    while not 4 <= len(case.hosts) + len(case.workers) <= 7 or len(case.workers) < 2 or len(case.hosts) < 2:
        case = random_case(family, chance)
    case.hosts = ["t"] * len(case.hosts)
    case.workers = [Worker(w.engine, "t") for w in case.workers]
    return case, redistribute(case.layouts, case.workers, case.hosts, 4096)


def member(me: int, family: str, port: int) -> dict[str, Any]:
    """One process, rank or worker: what it has sent, or digests of what it got in each update."""
    case, plan = one_host(family)
    plans, ranks = boxes_of(case, plan), len(case.hosts)
    count = ranks + len(case.workers)
    memory = SlowMemory(0.002)
    transport = WatchedPost(
        join_group(HERE, port, me, count, HERE, 20),
        me,
        ranks,
        20,
        exported_memory=ExportedMemory(memory),
    )
    if me < ranks:
        sender, numbers = rank_side(case, plan, plans, transport)
        sent = []
        for _ in range(UPDATES):
            sent.append(sender.send(numbers))
            for tensor in {id(o.parameter): o.parameter for o in numbers.own.values()}.values():
                tensor.mul_(-1.5)
        transport.group.group.barrier().wait()
        return {"sent": sent, "made": memory.made, "memory": len(sender.memory.buffer)}
    reader, found = worker_side(case, plan, plans, transport), []
    for _ in range(UPDATES):
        got: dict[str, torch.Tensor] = {}
        reader.receive(lambda tensors, last, got=got: got.update(tensors))
        found.append({n: digest(t.part if isinstance(t, PartTensor) else t) for n, t in got.items()})
    senders = {message.sender for message in reader.receive_plan.messages()}
    transport.group.group.barrier().wait()
    reader.close()
    return {"got": found, "opens": memory.opens, "senders": len(senders)}


def call_member(family: str, port: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return member(int(os.environ["RANK"]), family, port)


@pytest.mark.process
@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_same_as_gathered_between_processes(family: str) -> None:
    """Bit for bit, update after update; memory is made once, and opened once by each who reads it."""
    case, plan = one_host(family)
    server = open_store(HERE)
    ranks = len(case.hosts)
    try:
        found = run_ranks(ranks + len(case.workers), call_member, family, server.port)
    finally:
        del server
    sent = sum(one["sent"][0] for one in found[:ranks])
    assert all(one["sent"][0] == one["sent"][1] and one["made"] == 1 for one in found[:ranks])
    assert sent == plan.sent().sum() == sum(t.size * 4 for t in case.tensors.values()), (
        "every byte once, for all workers"
    )
    assert max(one["memory"] for one in found[:ranks]) <= 2 * plan.limit
    for number, worker in enumerate(found[ranks:]):
        assert worker["opens"] == worker["senders"]
        for turn in range(UPDATES):
            for (other, name), (rows, columns) in case.spans.items():
                expected = cut(torch.from_numpy(case.tensors[name]).float() * (-1.5) ** turn, rows, columns)
                if other == number and expected.numel():
                    assert worker["got"][turn][name] == digest(expected), (number, turn, name)


def test_exported_memory_outlives_a_group() -> None:
    """Exported memory outlives a group and is replaced only by a larger one."""
    memory = SlowMemory(0.0)
    exported_memory = ExportedMemory(memory)
    first, _ = members(2, 1)
    transport = IpcTransport(first.group, 0, 1, 5, exported_memory=exported_memory)
    room = transport.allocate(100)
    room.close()
    assert len(room.buffer) == 0
    again = IpcTransport(first.group, 0, 1, 5, exported_memory=exported_memory).allocate(60)
    assert len(again.buffer) == 60 and again.to_wire()["size"] == 100 and again.to_wire()["name"] == room.wire["name"]
    assert transport.allocate(200).to_wire()["name"] != room.wire["name"] and memory.made == 2
    opened = transport.open(again.to_wire())
    again.buffer[0] = 77
    assert opened[0] == 77 and len(opened) == 100


def wire(**change: Any) -> dict[str, Any]:
    memory = HostMemory()
    block = memory.allocate(64)
    return {"name": base64.b64encode(memory.name(block)).decode(), "size": 64, "place": "host", "keep": block} | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "AAAA"}, "a name of 3 bytes"),
        ({"name": "no base64!"}, "memory of a device"),
        ({"name": 7}, "memory of a device:.*name"),
        ({"size": "64"}, "memory of a device:.*size"),
        ({"size": 0}, "for 0 bytes"),
        ({"size": -1}, "for -1 bytes"),
        ({"offset": 3}, "memory of a device:.*offset"),
        ({"place": None}, "memory of a device:.*place"),
    ],
)
def test_a_name_is_checked_field_by_field(change: dict[str, Any], message: str) -> None:
    good = wire()
    block = good.pop("keep")
    name, found = read_exported(good)
    assert len(name) == NAME_BYTES and found.size == 64 == block.buffer.numel()
    bad = {**good, **change}
    with pytest.raises(ValueError, match=message):
        read_exported(bad)


def test_forged_memory_is_refused() -> None:
    """Memory that is not what its name says is refused."""
    good = wire()
    block = good.pop("keep")
    transport = IpcTransport(members(2, 1)[0].group, 0, 1, 5)
    with pytest.raises(ValueError, match="not the region"):
        transport.open(good | {"size": 128})
    assert len(transport.open(good)) == 64
    block.owner.close()
    with pytest.raises((OSError, ValueError)):
        transport.open(good)


def test_message_beyond_the_end_of_memory() -> None:
    """A message beyond the end of the memory is refused."""
    case, plan = simple()
    case.workers = [Worker(0, "t")]
    plan = redistribute(case.layouts, case.workers, case.hosts, 256)
    posts = members(2, 1)
    ends = [IpcTransport(transport.group, transport.me, 1, 5) for transport in posts]
    reader = worker_side(case, plan, boxes_of(case, plan), ends[1])
    assert reader.memory is None, "nothing comes over sockets"
    small = ends[0].allocate(64)
    ends[0].show("memory of 0", json.dumps(small.to_wire() | {"half": 0}))
    said = ends[0].tell(1, READY)
    with pytest.raises(ValueError, match=r"bytes at 0 of a memory of 64"):
        reader.receive(lambda tensors, last: None)
    said.wait()


def test_waits_end_and_stay_on_the_host() -> None:
    """No wait for a device is unbounded, and nothing leaves the host."""
    posts = members(2, 1)
    transport = IpcTransport(posts[0].group, 0, 1, 0.1, exported_memory=ExportedMemory(SlowMemory(60)))
    with pytest.raises(DeadlineError, match="not copy weights within 0.1 s"):
        transport.settle()
    with pytest.raises(PeerError, match="engine worker 0 is on another host.*--weight-transfer shm"):
        transport.send(torch.zeros(4, dtype=torch.uint8), 1, DATA)
    workers = [{"worker": "0.0", "where": "a"}, {"worker": "0.1", "where": "c"}]
    with pytest.raises(UsageError, match=r"worker 0.1 of engine 0 cannot open .*; use --weight-transfer gloo"):
        _check_hosts([workers], ["a", "b"])


@pytest.mark.parametrize(
    ("change", "hosts", "cpu", "found"),
    [
        ({}, [Host("a", 2)], False, "hpcrl_ipc"),
        ({}, [Host("a", 2)], True, "--weight-transfer ipc needs CUDA.*use auto or disk"),
        (
            {"colocate": False},
            [Host("a", 4)],
            False,
            "--weight-transfer ipc is for engines.*--colocate",
        ),
        ({"actor_num_nodes": 2, "rollout_num_gpus": 4}, [Host("a", 2), Host("b", 2)], False, "hpcrl_ipc"),
    ],
)
def test_where_it_can_be(change: dict[str, Any], hosts: list[Host], cpu: bool, found: str) -> None:
    values = {"hf_checkpoint": "x", "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "colocate": True}
    options = Options(**(values | {"weight_transfer": "ipc"} | change))
    plan = make_plan(options, hosts, "run")
    if found.startswith("hpcrl"):
        assert backend(options, plan, cpu) == found
    else:
        with pytest.raises(UsageError, match=found):
            backend(options, plan, cpu)


# ---- CUDA's calls, as far as they can be made without a GPU

STAND_IN = """
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char reserved[64]; } handle_t;      /* cudaIpcMemHandle_t */
static void *opened; static unsigned flags_seen;
int cudaMalloc(void **found, size_t size) { if (size > 1000000) return 2; *found = malloc(size); return 0; }
int cudaIpcGetMemHandle(handle_t *found, void *at) {
    for (int i = 0; i < 64; i++) found->reserved[i] = (unsigned char)(i * 5);
    memcpy(found->reserved, &at, sizeof at); return 0; }
int cudaIpcOpenMemHandle(void **found, handle_t handle, unsigned flags) {
    for (int i = sizeof *found; i < 64; i++) if (handle.reserved[i] != (unsigned char)(i * 5)) return 400;
    if (flags != 1) return 1;
    memcpy(found, handle.reserved, sizeof *found); opened = *found; return 0; }
int cudaIpcCloseMemHandle(void *at) { if (at != opened) return 1; opened = 0; return 0; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "invalid resource handle"; }
"""


@needs("cc")
def test_cuda_functions_as_declared(tmp_path: Path) -> None:
    """Types, the handle by value, its zero bytes kept, errors in CUDA's own words: not whether a GPU does what they
    say."""
    (tmp_path / "cudart.c").write_text(STAND_IN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcudart.so", "cudart.c"], cwd=tmp_path, check=True, timeout=240)
    runtime = Runtime(str(tmp_path / "libcudart.so"))
    address = runtime.allocate(4096)
    buffer = tensor_at(address, 4096, torch.device("cpu"))
    buffer.fill_(9)
    handle = runtime.handle(address)
    assert len(handle) == NAME_BYTES and 0 in handle
    there = tensor_at(runtime.open(handle), 4096, torch.device("cpu"))
    assert there.data_ptr() == address and bool((there == 9).all())
    runtime.close(there.data_ptr())
    for what, message in (
        (lambda: runtime.close(address), r"cudaIpcCloseMemHandle failed: invalid resource.*\(error 1\)"),
        (lambda: runtime.allocate(2_000_000), r"cudaMalloc failed: out.*\(error 2\)"),
        (lambda: runtime.open(bytes(NAME_BYTES)), "cudaIpcOpenMemHandle failed: invalid resource"),
    ):
        with pytest.raises(PeerError, match=f"{message}.*--weight-transfer shm"):
            what()


def test_memory_stays_open_until_its_user_closes_it() -> None:
    """The thread that sees another member leave ends the group alone: the update's own may still be reading."""

    class Recorded(HostMemory):
        closed = 0

        def close(self, block: object) -> None:
            self.closed += 1

    memory = Recorded()
    rank, other = members(2, 1)
    mine = IpcTransport(rank.group, 0, 1, 20, exported_memory=ExportedMemory(memory))
    mine._opened.append(memory.allocate(64))
    mine.leave()
    assert memory.closed == 0 and mine.group.group is None
    mine.close()
    other.close()
    assert memory.closed == 1
