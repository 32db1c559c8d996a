"""The plan of redistribution over random layouts of both sides, carried out on small arrays: every family, every kind
of cut."""

from __future__ import annotations

from random import Random
from typing import Any

import networkx as nx
import numpy as np
import pytest

from hpcrl.weights.redistribution.layouts import Layouts, TensorPart, Worker, sources, targets, whole
from hpcrl.weights.redistribution.plan import Redistribution, redistribute
from tests.support.families import SIZES
from tests.support.layouts import Case, random_case


def carry_out(case: Case, plan: Redistribution) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    """Send every piece; (worker, tensor) -> (what it has in the end, how often each element came)."""
    got = {}
    for (worker, name), (rows, columns) in case.spans.items():
        width = columns[1] if columns is not None else case.tensors[name].shape[1]
        shape = (sum(length for _, length in rows), width)
        got[worker, name] = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=int)
    for i in range(len(plan.tensor)):
        name = case.layouts.names[plan.tensor[i]]
        area = tuple(int(x[i]) for x in (plan.top, plan.bottom, plan.left, plan.right))
        own, places, which = case.parts[int(plan.sender[i]), name]
        piece = np.full((area[1] - area[0], area[3] - area[2]), -1, dtype=np.int32)
        assert piece.nbytes == plan.nbytes[i]
        for part, inside in sources(places, which, area):
            piece[inside] = own[part]
        assert (piece >= 0).all(), "the sender does not hold what it is to send"
        for number, destination in enumerate(plan.destinations):
            if number == plan.destination[i]:
                deliver(case, destination.workers, name, area, piece, got)
    return got


def deliver(case: Case, workers: tuple[int, ...], name: str, area: Any, piece: np.ndarray, got: Any) -> None:
    used = np.zeros(piece.shape, dtype=bool)
    for worker in workers:
        mine, count = got[worker, name]
        for inside, part in targets(*case.spans[worker, name], area):
            mine[inside] = piece[part]
            count[inside] += 1
            used[part] = True
    assert used.all(), "something was sent that nobody there needs"


def least(case: Case, plan: Redistribution) -> float:
    """What the busiest rank must send at least, to a thousandth: by halving, as a flow from copies through ranks."""
    held: dict[tuple[int, ...], int] = {}
    for i, number in enumerate(plan.tensor):
        pattern = case.layouts.patterns[case.layouts.held[number]]
        owners = tuple(sorted({rank for part in pattern if _inside(plan, i, part) for rank in part.who}))
        host = plan.destinations[plan.destination[i]].host
        near = tuple(rank for rank in owners if case.hosts[rank] == host) or owners
        held[near] = held.get(near, 0) + int(plan.nbytes[i])
    graph, total = nx.DiGraph(), sum(held.values())
    for owners, amount in held.items():
        graph.add_edge("from", owners, capacity=amount)
        for rank in owners:
            graph.add_edge(owners, rank)  # without a limit
    low, high = total / len(case.hosts), float(total)
    while high - low > 1e-3 * high:
        level = (low + high) / 2
        for rank in {rank for owners in held for rank in owners}:
            graph.add_edge(rank, "to", capacity=level)
        enough = nx.maximum_flow_value(graph, "from", "to") >= total * (1 - 1e-9)
        low, high = (low, level) if enough else (level, high)
    return high


def _inside(plan: Redistribution, i: int, part: TensorPart) -> bool:
    rows, columns = part.rows, part.columns
    return bool(
        rows[0] <= plan.top[i]
        and plan.bottom[i] <= rows[1]
        and columns[0] <= plan.left[i]
        and plan.right[i] <= columns[1]
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", SIZES)
def test_each_element_arrives_once(family: str, seed: int) -> None:
    """Every needed element arrives once and is the right one."""
    chance = Random(f"{family}{seed}")
    case = random_case(family, chance)
    limit = chance.choice([1024, 4096, 1 << 20])
    plan = redistribute(case.layouts, case.workers, case.hosts, limit)
    for (worker, name), (mine, count) in carry_out(case, plan).items():
        rows, columns = case.spans[worker, name]
        tensor = case.tensors[name] if columns is None else case.tensors[name][:, columns[0] : columns[0] + columns[1]]
        wanted = np.concatenate([tensor[start : start + length] for start, length in rows])
        assert (count == 1).all(), name
        assert np.array_equal(mine, wanted), name
    assert max(plan.largest()) <= limit
    assert (np.diff(plan.round) >= 0).all()
    assert plan.sent().max() <= 1.1 * least(case, plan)


def big_layouts(engines: int, replicas: int) -> tuple[Layouts, list[Worker], list[str]]:
    """Tensors on `replicas` ranks, for engines of one worker, each on its own host."""
    layouts = Layouts()
    workers = [Worker(i, f"e{i}") for i in range(engines)]
    held = layouts.pattern([whole((512, 64), range(replicas))])
    needed = layouts.pattern([whole((512, 64), range(engines))])
    for number in range(20):
        layouts.add(f"w{number}", (512, 64), 2, held, needed)
    return layouts, workers, [f"t{i}" for i in range(replicas)]


def test_copies_share_the_load() -> None:
    """Copies share the load and work at the same time."""
    layouts, workers, hosts = big_layouts(1, 4)
    plan = redistribute(layouts, workers, hosts, 64 << 10)
    assert plan.sent().max() <= 1.01 * plan.sent().sum() / 4
    each = np.bincount(plan.round * 4 + plan.sender, minlength=plan.rounds * 4).reshape(-1, 4)
    assert (each > 0).any(0).all()
    assert plan.rounds <= 1.5 * plan.sent().sum() / (64 << 10) + 4, "rounds that are nearly empty"


def test_every_engine_gets_all_from_the_ranks() -> None:
    plan = redistribute(*big_layouts(engines=6, replicas=2), limit=1 << 20)
    assert set(plan.received()) == {20 * 512 * 64 * 2}
    assert plan.sent().sum() == plan.received().sum()
    assert plan.sent().max() <= 1.01 * plan.sent().sum() / 2


def test_same_host_sources_are_preferred() -> None:
    """What is on the engine's host is taken from there."""
    layouts, workers, _ = big_layouts(2, 2)
    plan = redistribute(layouts, workers, ["e0", "e1"], 1 << 20)
    assert not plan.crossing().any()
    assert plan.sent().tolist() == [20 * 512 * 64 * 2] * 2


def test_in_place_reads_take_no_memory() -> None:
    """Four ranks of the engine's host then send as much in a round as each may."""
    layouts, workers, _ = big_layouts(1, 4)
    limit = 64 << 10
    copied, there, away = (
        redistribute(layouts, workers, hosts, limit, in_place)
        for hosts, in_place in ((["e0"] * 4, False), (["e0"] * 4, True), (["e0", "t", "t", "t"], True))
    )
    assert copied.largest() == (limit, limit)
    assert there.largest() == (limit, 0)
    assert there.rounds < copied.rounds / 3
    assert (there.sent() == copied.sent()).all()
    assert away.largest()[1] <= limit


def test_a_row_longer_than_a_round_is_cut_too() -> None:
    layouts = Layouts()
    layouts.add(
        "wide", (3, 1000), 4, layouts.pattern([whole((3, 1000), (0,))]), layouts.pattern([whole((3, 1000), (0,))])
    )
    plan = redistribute(layouts, [Worker(0, "e")], ["t"], 1024)
    assert plan.nbytes.sum() == 12000
    assert max(plan.largest()) <= 1024


def test_what_nobody_holds_is_an_error() -> None:
    layouts = Layouts()
    held, needed = (layouts.pattern([TensorPart((0, rows), (0, 2), (0,))]) for rows in (3, 4))
    layouts.add("w", (4, 2), 2, held, needed)
    with pytest.raises(ValueError, match="no rank holds"):
        redistribute(layouts, [Worker(0, "e")], ["t"], 1024)
    with pytest.raises(ValueError, match="63 bytes"):
        redistribute(layouts, [Worker(0, "e")], ["t"], 63)


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("rows", [2, 3, 5, 10])
def test_copies_of_one_tensor_share_its_rows(copies: int, rows: int) -> None:
    """Each copy sends as many rows as any other, or one more; every row is sent once, the first and the last too."""
    layouts = Layouts()
    held = layouts.pattern([whole((rows, 64), range(copies))])
    layouts.add("w", (rows, 64), 4, held, layouts.pattern([whole((rows, 64), (0,))]))
    plan = redistribute(layouts, [Worker(0, "e")], ["t"] * copies, 1 << 20)
    assert sorted(row for a, b in zip(plan.top, plan.bottom, strict=True) for row in range(a, b)) == list(range(rows))
    sent = plan.sent() // 256
    assert sent.sum() == rows and sent.max() - sent.min() <= 1


def test_a_link_takes_what_arrives_evenly() -> None:
    """Bytes for another host land on as many ranks there as send them, each at the place of its sender."""
    layouts = Layouts()
    held = layouts.pattern([whole((64, 64), range(4))])
    layouts.add("w", (64, 64), 4, held, layouts.pattern([whole((64, 64), (0,))]))
    hosts = ["a", "a", "a", "a", "b", "b", "b", "b"]
    plan = redistribute(layouts, [Worker(0, "b")], hosts, 1 << 20, through_ranks=True)
    assert plan.landing().tolist() == [0, 0, 0, 0, 4096, 4096, 4096, 4096]
    assert plan.crossing().tolist() == [4096] * 4 + [0] * 4
    with pytest.raises(ValueError, match="rank is on c"):
        redistribute(layouts, [Worker(0, "c")], hosts, 1 << 20, through_ranks=True)
