"""Pieces in groups, as they go over NCCL: the same code with a wire of gloo that runs a member's groups strictly one
after another."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.engine.pieces.part_tensor import PartTensor
from hpcrl.errors import DeadlineError, PeerError, UsageError
from hpcrl.plan import Host, make_plan
from hpcrl.weights.comparison import cut
from hpcrl.weights.pieces.device_transport import DeviceTransport
from hpcrl.weights.pieces.peer_transport import GlooGroup
from hpcrl.weights.pieces.wire import DATA
from hpcrl.weights.redistribution.layouts import Worker
from hpcrl.weights.redistribution.plan import redistribute
from hpcrl.weights.update_backend import backend
from tests.support.layouts import random_case
from tests.weights.pieces.test_pieces import boxes_of, closed, members, rank_side, simple, worker_side  # noqa: F401


class Ended:
    """A group under way."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def query(self) -> bool:
        if self.future.done():
            self.future.result()
        return self.future.done()


class GlooWire:
    """One group after the other, each begun as a whole."""

    device = torch.device("cpu")

    def __init__(self, group: GlooGroup) -> None:
        self.group = group
        self.stream = ThreadPoolExecutor(1)
        self.groups = 0

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Ended:
        self.groups += 1
        return Ended(self.stream.submit(self._exchange, sends, receives))

    def _exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        works = [self.group.group.send([tensor], member, 7) for tensor, member in sends]
        works += [self.group.group.recv([tensor], member, 7) for tensor, member in receives]
        for work in works:
            work.wait()

    def close(self) -> None:
        self.stream.shutdown(wait=False, cancel_futures=True)


def posts_of(count: int, ranks: int, seconds: float = 20) -> list[DeviceTransport]:
    words, bytes_ = members(count, ranks), members(count, ranks)
    return [
        DeviceTransport(a.group, a.me, ranks, seconds, wire=GlooWire(b.group))
        for a, b in zip(words, bytes_, strict=True)
    ]


@pytest.mark.parametrize(("family", "engines"), [("qwen3", 2), pytest.param("qwen3_moe", 3, marks=pytest.mark.process)])
def test_every_worker_gets_its_own(family: str, engines: int) -> None:
    """Each worker is a destination of its own, and no order of groups waits for itself."""
    chance = Random(f"groups {family}")
    case = random_case(family, chance)
    while len(case.hosts) + len(case.workers) > 12:
        case = random_case(family, chance)
    case.workers = [Worker(w.engine, f"worker {number}") for number, w in enumerate(case.workers)]
    plan = redistribute(case.layouts, case.workers, case.hosts, 4096)
    plans, ranks = boxes_of(case, plan), len(case.hosts)
    posts = posts_of(ranks + len(case.workers), ranks)

    def rank(transport: DeviceTransport) -> int:
        sender, numbers = rank_side(case, plan, plans, transport)
        assert sender.send(numbers) == sender.send(numbers)
        assert isinstance(transport.wire, GlooWire)
        assert transport.wire.groups == 2 * len(sender.rounds), "one group for each round"
        return len(sender.memory.buffer)

    def worker(transport: DeviceTransport) -> dict[str, torch.Tensor]:
        got: dict[str, torch.Tensor] = {}
        reader = worker_side(case, plan, plans, transport)
        for _ in range(2):
            reader.receive(lambda tensors, last: got.update(tensors))
        return got

    with ThreadPoolExecutor(len(posts)) as pool:
        sent = [pool.submit(rank, transport) for transport in posts[:ranks]]
        got = [future.result(60) for future in [pool.submit(worker, transport) for transport in posts[ranks:]]]
        assert max(future.result(60) for future in sent) <= 2 * plan.limit
    for (number, name), (rows, columns) in case.spans.items():
        expected = cut(torch.from_numpy(case.tensors[name]).float(), rows, columns)
        if expected.numel():
            found = got[number][name]
            assert torch.equal(found.part if isinstance(found, PartTensor) else found, expected), name


def test_waiting_peers_and_leaving_peers() -> None:
    """A wire says nothing of the other end: a group that is not taken is under way for ever."""
    posts = posts_of(3, 2)
    first, second, _ = posts
    wires = [transport.wire for transport in posts]  # gloo's would tell that they close
    moved = first.receive(torch.zeros(4, dtype=torch.uint8), 1, DATA)
    first.flush()
    leaving = threading.Timer(0.5, second.close)
    leaving.start()
    begin = time.monotonic()
    with pytest.raises(PeerError, match="a member left"):
        moved.wait()
    assert time.monotonic() - begin < 10 and len(wires) == 3
    others = posts_of(3, 2, seconds=0.3)
    late = others[0]
    moved = late.receive(torch.zeros(4, dtype=torch.uint8), 1, DATA)
    late.flush()
    with pytest.raises(DeadlineError, match="receiving weights from trainer.*1 did not end within 0 s"):
        moved.wait()
    late.close()
    late.send(torch.zeros(4, dtype=torch.uint8), 1, DATA)
    with pytest.raises(PeerError, match="was closed"):
        late.flush()


@pytest.mark.parametrize(
    ("options", "cpu", "way"),
    [
        ({}, False, "hpcrl_vllm"),
        ({"actor_num_nodes": 2}, False, "hpcrl_nccl"),
        ({"colocate": True}, False, "hpcrl_vllm_ipc"),
        ({"colocate": True, "actor_num_nodes": 2}, False, "hpcrl_ipc"),
        ({}, True, "hpcrl_shm"),
        ({"weight_transfer": "nccl"}, True, "--weight-transfer nccl needs CUDA"),
        ({"weight_transfer": "nccl", "colocate": True}, False, "--weight-transfer nccl takes.*once"),
        ({"weight_transfer": "vllm"}, True, "--weight-transfer vllm needs CUDA"),
    ],
)
def test_the_way_of_pieces(options: dict[str, Any], cpu: bool, way: str) -> None:
    """vLLM's own transfer is for a trainer on one node; pieces go from GPU to GPU."""
    both = options.get("colocate", False)
    resolved = Options(hf_checkpoint="x", actor_num_gpus_per_node=1, rollout_num_gpus=1, **options)
    hosts = [Host(f"n{number}", 1 if both else 2) for number in range(resolved.actor_num_nodes)]
    plan = make_plan(resolved, hosts, "run")
    if way.startswith("--"):
        with pytest.raises(UsageError, match=way):
            backend(resolved, plan, cpu)
    else:
        assert backend(resolved, plan, cpu) == way


def test_vllms_binding_is_as_it_is_called() -> None:
    """The names of its arguments, the size of NCCL's name, and what ends a communicator, in the vLLM that is here."""
    common = pytest.importorskip("vllm.distributed.weight_transfer.nccl_common")
    assert list(inspect.signature(common.uid_init_process_group).parameters)[1:] == ["rank", "world_size", "device"]
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    assert len(bytes(memoryview(wrapper.ncclUniqueId().internal))) == 128
    assert {"ncclCommAbort", "ncclCommDestroy"} <= {
        function.name for function in wrapper.NCCLLibrary.exported_functions
    }
