"""Whole tensors of rank 0 as pieces: drawn from a stream in its order, and packed beforehand where they fit into one
round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from hpcrl.errors import HpcrlError
from hpcrl.weights.comparison import cut
from hpcrl.weights.pieces.gathered import StreamedValues
from hpcrl.weights.pieces.messages import pieces_of, to_bytes
from hpcrl.weights.pieces.piece_sender import PieceSender
from hpcrl.weights.pieces.piece_update import obstacle, send_targets
from hpcrl.weights.redistribution.layouts import Layouts, Worker, whole
from hpcrl.weights.redistribution.plan import Redistribution, redistribute
from tests.support.layouts import Case, random_case
from tests.weights.pieces.test_pieces import boxes_of, closed, members, with_cost, worker_side  # noqa: F401

WHOLE_MODEL = 1 << 30


def gathered_plan(case: Case, limit: int) -> Redistribution:
    """Of the case's tensors, all on rank 0."""
    layouts = Layouts()
    for name, shape, item, needed in zip(
        case.layouts.names, case.layouts.shapes, case.layouts.items, case.layouts.needed, strict=True
    ):
        mine = layouts.pattern([whole(shape, (0,))])
        layouts.add(name, shape, item, mine, layouts.pattern(case.layouts.patterns[needed]))
    return redistribute(layouts, case.workers, case.hosts, limit, in_place=True)


def values_of(plan: Redistribution, stream: Iterator[tuple[str, torch.Tensor]]) -> StreamedValues:
    names = plan.layouts.names
    pieces = pieces_of(0, to_bytes(plan))
    uses = Counter(names[tensor] for tensor in pieces[:, 0].tolist())
    return StreamedValues(stream, dict.fromkeys(names, "float32"), uses)


@pytest.mark.parametrize(("limit", "staged"), [(4096, False), (WHOLE_MODEL, True)])
@pytest.mark.parametrize("family", ["qwen3", with_cost("glm4_moe")])
def test_whole_tensors_reach_every_worker(family: str, limit: int, staged: bool) -> None:
    """Two updates, which differ, over memory and sockets; or packed beforehand, where all lies in one round."""
    chance = Random(f"gathered {family}")
    case = random_case(family, chance)
    while len(case.workers) > 10 or len({w.host for w in case.workers}) < 2:
        case = random_case(family, chance)
    case.hosts = ["here"]
    if staged:
        case.workers = [Worker(w.engine, "here") for w in case.workers]
    else:
        near = dict(zip(sorted({w.host for w in case.workers}), ["here", "x", "y", "z"], strict=False))
        case.workers = [Worker(w.engine, near.get(w.host, w.host)) for w in case.workers]
    plan = gathered_plan(case, limit)
    assert (plan.rounds == 1) is staged
    plans = boxes_of(case, plan)
    posts = members(1 + len(case.workers), 1)

    def rank() -> list[int]:
        sender = PieceSender(
            posts[0], pieces_of(0, to_bytes(plan)), plan.layouts.names, send_targets(plan, plans, 0), plan.limit
        )
        sent = []
        for turn in range(2):
            values = values_of(plan, stream(turn))
            assert sender.stage(values) is staged
            sent.append(sender.send(values))
            assert not values._here and next(values._stream, None) is None
        return sent

    def stream(turn: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name in plan.layouts.names:
            yield name, torch.from_numpy(case.tensors[name]).double() * (1 - 2 * turn)

    def worker(number: int) -> list[dict[str, torch.Tensor]]:
        reader = worker_side(case, plan, plans, posts[1 + number])
        found = []
        for _ in range(2):
            got: dict[str, torch.Tensor] = {}
            reader.receive(lambda tensors, last, got=got: got.update(tensors))
            found.append({name: getattr(tensor, "part", tensor) for name, tensor in got.items()})
        return found

    with ThreadPoolExecutor(len(posts)) as pool:
        sent = pool.submit(rank)
        taken = [pool.submit(worker, number) for number in range(len(case.workers))]
        got = [future.result(60) for future in taken]
        assert set(sent.result(60)) == {int(plan.sent().sum())}
    for (number, name), (rows, columns) in case.spans.items():
        for turn in range(2):
            expected = cut(torch.from_numpy(case.tensors[name]).float() * (1 - 2 * turn), rows, columns)
            if expected.numel():
                assert torch.equal(got[number][turn][name], expected), (name, turn)


def test_tensors_are_drawn_when_they_are_packed() -> None:
    """Not before; and dropped once all their pieces are."""
    drawn = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            drawn.append(name)
            yield name, torch.full((4, 2), float(len(drawn)))

    values = StreamedValues(stream(), {}, {"a": 2, "b": 1, "c": 1})
    out = torch.zeros(2, 2)
    values.write("a", (0, 2, 0, 2), out)
    assert drawn == ["a"] and out.unique().tolist() == [1.0]
    values.write("b", (0, 2, 0, 2), out)
    assert values._here.keys() == {"a"}, "half of it is still to be packed"
    values.write("a", (2, 4, 0, 2), out)
    assert not values._here and drawn == ["a", "b"]
    values.close()
    assert drawn == ["a", "b", "c"], "an export is gone through to its end"


@pytest.mark.parametrize(
    ("backend", "unseen", "wish", "why"),
    [
        ("hpcrl_shm", {}, "auto", "model.odd."),
        ("hpcrl_shm", {"model.odd.weight": None}, "gathered", None),
        ("hpcrl_nccl", {"model.odd.weight": None}, "gathered", "from host memory"),
        ("hpcrl_nccl", {"model.odd.weight": None}, "resharded", None),
        ("hpcrl_disk", {"model.odd.weight": None}, "auto", "hpcrl_disk"),
    ],
)
def test_what_cannot_be_planned_is_named(backend: str, unseen: dict[str, None], wish: str, why: str | None) -> None:
    found = obstacle([[{"backend": backend, "opaque": ["model.odd."], "unseen": unseen}]], wish)
    assert found is None if why is None else why in (found or "")


def test_stream_that_lacks_a_tensor() -> None:
    values = StreamedValues(iter([("a", torch.zeros(2))]), {}, {"a": 1, "b": 1})
    with pytest.raises(HpcrlError, match="not exported b"):
        values.write("b", (0, 2, 0, 1), torch.zeros(2, 1))
