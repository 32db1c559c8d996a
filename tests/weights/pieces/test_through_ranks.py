"""Pieces for workers on GPUs of ranks of several hosts: from rank to rank over a wire, and out of the ranks' memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch

from hpcrl.engine.pieces.part_tensor import PartTensor
from hpcrl.weights.comparison import cut
from hpcrl.weights.pieces.ipc_transport import IpcTransport
from hpcrl.weights.pieces.peer_transport import Transfer
from hpcrl.weights.redistribution.layouts import Worker
from hpcrl.weights.redistribution.plan import Redistribution, carriers, find_destinations, redistribute
from tests.support.layouts import Case, random_case
from tests.weights.pieces.test_device_transport import GlooWire
from tests.weights.pieces.test_pieces import boxes_of, closed, members, rank_side, worker_side  # noqa: F401


@dataclass
class CountedPost(IpcTransport):
    """Counts what it tells others."""

    told: int = 0

    def tell(self, to: int, tag: int) -> Transfer:
        self.told += 1
        return super().tell(to, tag)


def several_hosts(family: str) -> tuple[Case, Redistribution]:
    """Ranks of at least two hosts, and workers on all of these."""
    chance = Random(f"through {family}")
    case = random_case(family, chance)
    while not 4 <= len(case.hosts) + len(case.workers) <= 12 or len(set(case.hosts)) < 2 or len(case.workers) < 2:
        case = random_case(family, chance)
    places = list(dict.fromkeys(case.hosts))
    case.workers = [Worker(w.engine, places[number % len(places)]) for number, w in enumerate(case.workers)]
    return case, redistribute(case.layouts, case.workers, case.hosts, 2048, through_ranks=True)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.process)])
def test_every_worker_of_every_host(family: str) -> None:
    """Two updates reach all workers bit for bit; bytes between hosts go over the wire, once."""
    case, plan = several_hosts(family)
    assert plan.far().any()
    plans, ranks = boxes_of(case, plan), len(case.hosts)
    assert all(message.near for box in plans for message in box.messages())
    words, wires = (members(ranks + len(case.workers), ranks) for _ in range(2))
    ends = [
        CountedPost(a.group, a.me, ranks, 20, wire=GlooWire(b.group) if a.me < ranks else None)
        for a, b in zip(words, wires, strict=True)
    ]

    def rank(transport: CountedPost) -> tuple[list[int], int]:
        sender, numbers = rank_side(case, plan, plans, transport)
        sent = [sender.send(numbers)]
        for tensor in {id(own.parameter): own.parameter for own in numbers.own.values()}.values():
            tensor.mul_(-1.5)
        return [*sent, sender.send(numbers)], len(sender.memory.buffer)

    def worker(transport: CountedPost) -> list[dict[str, torch.Tensor]]:
        reader = worker_side(case, plan, plans, transport)
        assert reader.memory is None, "all is read in memory of ranks"
        got: list[dict[str, torch.Tensor]] = []
        for _ in range(2):
            got.append({})
            reader.receive(
                lambda tensors, last, found=got[-1]: found.update(
                    {name: (t.part if isinstance(t, PartTensor) else t).clone() for name, t in tensors}
                )
            )
        return got

    with ThreadPoolExecutor(len(ends)) as pool:
        sent = [pool.submit(rank, end) for end in ends[:ranks]]
        got = [future.result(60) for future in [pool.submit(worker, end) for end in ends[ranks:]]]
        answers = [future.result(60) for future in sent]
    assert sum(first for (first, _), _ in answers) == plan.sent().sum()
    assert all(first == again for (first, again), _ in answers)
    assert max(memory for _, memory in answers) <= 4 * plan.limit
    pairs = [{message.sender for message in messages} for box in plans for messages in box.rounds for _ in box.workers]
    once = 2 * sum(map(len, pairs))
    assert sum(end.told for end in ends[:ranks]) == sum(end.told for end in ends[ranks:]) == once, "a round, both ways"
    assert once < 2 * sum(len(box.workers) * len(list(box.messages())) for box in plans)
    for turn in range(2):
        for (number, name), (rows, columns) in case.spans.items():
            expected = cut(torch.from_numpy(case.tensors[name]).float() * (-1.5) ** turn, rows, columns)
            if expected.numel():
                assert torch.equal(got[number][turn][name], expected), (turn, number, name)


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_bytes_of_a_plan_through_ranks(family: str) -> None:
    """Every byte that a host lacks arrives there once, and no round takes more than its limit of a rank's memory."""
    _, plan = several_hosts(family)
    assert plan.landing().sum() == plan.crossing().sum() == plan.arriving().sum()
    hosts = np.asarray(plan.hosts)
    places = np.asarray([destination.host for destination in plan.destinations])
    assert (hosts[plan.carrier()] == places[plan.destination]).all()
    packed, taken = plan.largest()
    assert packed <= 2 * plan.limit and taken == 0


def test_a_hosts_ranks_share_what_arrives() -> None:
    """The rank at the same place takes it in; a host without ranks is refused."""
    there = find_destinations([Worker(0, "b"), Worker(0, "b")])
    assert carriers(["a", "a", "a", "b", "b"], there).ravel().tolist() == [3, 4, 3, 3, 4]
    with pytest.raises(ValueError, match="no rank.*on b"):
        carriers(["a"], there)
