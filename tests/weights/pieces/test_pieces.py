"""Pieces from trainer ranks to workers over real gloo groups and real shared memory, with ranks and workers as
threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import EngineLost
from hpcrl.engine.pieces.assembly import Assembly
from hpcrl.engine.pieces.part_tensor import PartMissing, PartTensor, part_tensor
from hpcrl.engine.pieces.piece_receiver import PieceReceiver
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.models.files.fp8 import Scheme
from hpcrl.models.slicing import SourceRectangle
from hpcrl.transport.torch_store import open_store
from hpcrl.weights.comparison import cut
from hpcrl.weights.pieces.elements import OwnTensor, PieceValues, largest_values, prepare_values
from hpcrl.weights.pieces.messages import pieces_of, receive_plans, to_bytes
from hpcrl.weights.pieces.peer_transport import PeerTransport, Transfer, join_group
from hpcrl.weights.pieces.piece_sender import PieceSender
from hpcrl.weights.pieces.piece_update import PieceUpdate, send_targets
from hpcrl.weights.pieces.planning import HeldTensor, coded, layouts_of
from hpcrl.weights.pieces.wire import (
    HALVES,
    READY,
    ReceivePlan,
)
from hpcrl.weights.redistribution.layouts import Layouts, Worker, whole
from hpcrl.weights.redistribution.plan import Redistribution, redistribute
from tests.support.families import EXPERTS, SIZES
from tests.support.layouts import Case, random_case

HERE = "127.0.0.1"
SERVERS: list[TCPStore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Every store that a test opened is closed after it."""
    yield
    SERVERS.clear()


def boxes_of(case: Case, plan: Redistribution) -> list[ReceivePlan]:
    names = case.layouts.names
    return receive_plans(plan, dict.fromkeys(names, "float32"), {n: tuple(case.tensors[n].shape) for n in names})


def members(count: int, ranks: int) -> list[PeerTransport]:
    server = open_store(HERE)
    SERVERS.append(server)
    with ThreadPoolExecutor(count) as pool:
        joined = [pool.submit(join_group, HERE, server.port, i, count, HERE, 20) for i in range(count)]
        return [PeerTransport(future.result(30), i, ranks, 20) for i, future in enumerate(joined)]


def rank_side(
    case: Case, plan: Redistribution, plans: list[ReceivePlan], transport: PeerTransport
) -> tuple[PieceSender, PieceValues]:
    to = send_targets(plan, plans, transport.me)
    own = {
        name: OwnTensor(torch.from_numpy(part).float(), places, which, tuple(case.tensors[name].shape))
        for (rank, name), (part, places, which) in case.parts.items()
        if rank == transport.me
    }
    numbers = prepare_values(own, dict.fromkeys(case.layouts.names, "float32"), None, lambda _: None)
    return PieceSender(transport, pieces_of(transport.me, to_bytes(plan)), case.layouts.names, to, plan.limit), numbers


def worker_side(case: Case, plan: Redistribution, plans: list[ReceivePlan], transport: PeerTransport) -> PieceReceiver:
    worker = transport.me - plan.ranks
    receive_plan = next(box for box in plans if transport.me in box.workers)
    held = {name: span for (number, name), span in case.spans.items() if number == worker}
    return PieceReceiver(transport, receive_plan, held)


def with_cost(family: str) -> Any:
    """Experts make several times as many pieces: seconds, which are the second layer's."""
    return pytest.param(family, marks=pytest.mark.process) if family in EXPERTS else family


@pytest.mark.parametrize("family", [*map(with_cost, SIZES)])
def test_two_updates_arrive_in_memory_and_over_sockets(family: str) -> None:
    chance = Random(f"pieces {family}")
    case = random_case(family, chance)
    while len(case.hosts) + len(case.workers) > 14:
        case = random_case(family, chance)
    near = dict(zip(sorted({w.host for w in case.workers}), ["t0", "x", "y", "z"], strict=False))
    case.workers = [Worker(w.engine, near.get(w.host, w.host)) for w in case.workers]
    plan = redistribute(case.layouts, case.workers, case.hosts, chance.choice([2048, 8192]))
    plans, ranks = boxes_of(case, plan), len(case.hosts)
    posts = members(ranks + len(case.workers), ranks)
    got: dict[tuple[int, str], torch.Tensor] = {}

    def rank(transport: PeerTransport) -> int:
        sender, numbers = rank_side(case, plan, plans, transport)
        first = sender.send(numbers)
        for tensor in {id(o.parameter): o.parameter for o in numbers.own.values()}.values():
            tensor.add_(1)
        assert sender.send(numbers) == first
        assert len(sender.memory.buffer) <= 2 * plan.limit
        return first

    def worker(transport: PeerTransport) -> None:
        reader = worker_side(case, plan, plans, transport)
        calls: list[bool] = []

        def load(tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
            calls.append(last)
            got.update({(transport.me - ranks, name): tensor for name, tensor in tensors})

        reader.receive(load)
        for key in [key for key in got if key[0] == transport.me - ranks]:
            del got[key]
        calls.clear()
        reader.receive(load)
        assert calls[-1]
        assert not any(calls[:-1])
        assert reader.memory is None or len(reader.memory.buffer) <= max(1, 2 * plan.limit)
        parts = [4 * size for size in reader.assembly.size.values()]
        assert reader.assembly.most <= 4 * (plan.limit + max(parts)), (
            "what has come in part: a round and its edges, not the model"
        )

    with ThreadPoolExecutor(len(posts)) as pool:
        sent = [pool.submit(rank, transport) for transport in posts[:ranks]]
        taken = [pool.submit(worker, transport) for transport in posts[ranks:]]
        for future in taken:
            future.result(60)
        assert sum(future.result(60) for future in sent) == plan.sent().sum()
    for (number, name), (rows, columns) in case.spans.items():
        expected = cut(torch.from_numpy(case.tensors[name]).float() + 1, rows, columns)
        if expected.numel():
            found = got[number, name]
            found = found.part if isinstance(found, PartTensor) else found
            assert torch.equal(found, expected), name


def simple(engines: int = 1) -> tuple[Case, Redistribution]:
    layouts = Layouts()
    case = Case(["t"], [Worker(i, f"e{i}") for i in range(engines)])
    for number in range(4):
        name = f"w{number}"
        case.tensors[name] = np.arange(64, dtype=np.int32).reshape(8, 8) + 100 * number
        parts = [layouts.pattern([whole((8, 8), range(count))]) for count in (1, engines)]
        layouts.add(name, (8, 8), 4, *parts)
        case.parts[0, name] = case.tensors[name], [SourceRectangle(0, (0, 8), None, 0)], 0
        for worker in range(engines):
            case.spans[worker, name] = [(0, 8)], None
    case.layouts = layouts
    return case, redistribute(layouts, case.workers, case.hosts, 256)


def test_messages_of_this_host_are_awaited_first() -> None:
    """With each round that a worker is done with, the rank may say that the one HALVES later is ready."""
    case, _ = simple()
    case.workers = [Worker(0, "t")]
    plan = redistribute(case.layouts, case.workers, case.hosts, 256)
    plans, (rank, worker) = boxes_of(case, plan), members(2, 1)
    heard, ahead = [0], []

    class Noted(PeerTransport):
        def hear(self, source: int, tag: int) -> Transfer:
            heard[0] += tag == READY
            return super().hear(source, tag)

        def tell(self, to: int, tag: int) -> Transfer:
            ahead.append(heard[0] - len(ahead))
            return super().tell(to, tag)

    reader = worker_side(case, plan, plans, Noted(worker.group, worker.me, 1, 20))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(reader.receive, lambda tensors, last: None)
        sender, numbers = rank_side(case, plan, plans, rank)
        sender.send(numbers)
        taken.result(20)
    assert len(reader.receive_plan.rounds) == 4
    assert ahead == [HALVES + 1, HALVES + 1, HALVES, HALVES - 1], "to the last round, of which there is none after"


def test_leaving_member_ends_the_update() -> None:
    """A member that leaves ends the update for the others."""
    case, plan = simple(engines=2)
    plans, posts = boxes_of(case, plan), members(3, 1)
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(worker_side(case, plan, plans, posts[1]).receive, lambda tensors, last: None)
        sender, numbers = rank_side(case, plan, plans, posts[0])
        sending = pool.submit(sender.send, numbers)
        posts[2].close()
        with pytest.raises(PeerError, match="weights .* failed"):
            waiting.result(15)

        def again() -> None:
            for _ in range(3):  # what is small may have been sent before
                sending.result(15)
                sender.send(numbers)

        with pytest.raises(PeerError, match=r"weights .* engine worker \d failed"):
            again()


def test_send_that_never_ends_is_left_behind() -> None:
    """gloo does not end a send that was written in part when its receiver is killed: whoever leaves does not wait."""
    forever, left = Event(), Event()
    work = SimpleNamespace(wait=lambda _: forever.wait(60))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Transfer(work, torch.zeros(1), "sending weights", 60.0, left, True).wait)
        assert not waiting.done()
        left.set()
        with pytest.raises(PeerError, match="a member left"):
            waiting.result(10)
    forever.set()


def test_the_look_ends_with_the_process() -> None:
    """What runs at the interpreter's end ends the thread that looks at the store, also where the group was not left."""
    (member,) = members(1, 1)
    with member.update():
        pass
    member._end_watch()
    assert member._watch is not None and not member._watch.is_alive()
    member.leave()


@pytest.mark.parametrize("sign", ["another member fails", "the store ends"])
def test_update_ends_with_another_member(sign: str) -> None:
    """Who waits for a member that lives and says nothing is told by the sign of a third one, or by the store's end."""
    case, plan = simple(engines=2)
    plans, posts = boxes_of(case, plan), members(3, 1)
    reader = worker_side(case, plan, plans, posts[1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.receive, lambda tensors, last: None)
        if sign == "the store ends":
            del SERVERS[-1]
        else:
            with pytest.raises(ZeroDivisionError), posts[2].update():
                raise ZeroDivisionError
        with pytest.raises(PeerError, match="a member left"):
            waiting.result(15)
    with pytest.raises(PeerError, match="was closed"):
        posts[1].tell(0, READY)


def test_an_engine_lost_while_joining_ends_the_joins() -> None:
    """Ranks that wait in the group's store for an engine that is gone are told, before rank 0 asks anything else of
    them."""
    (member,) = members(1, 1)
    store = member.group.store
    update = PieceUpdate(SimpleNamespace(), [], Options(), None, HERE)
    update.store = SERVERS.pop()
    ended = Event()

    def join() -> None:
        try:
            store.wait(["of an engine that never comes"])
        finally:
            ended.set()

    class Pending:
        futures = ()

        def check(self) -> None:
            raise EngineLost("engine 1 died")

    with pytest.raises(EngineLost, match="engine 1 died"):
        update._watched(SimpleNamespace(abort=lambda: None), join, Pending())
    assert ended.is_set() and update.store is None


def test_incomplete_plan_is_refused() -> None:
    """A plan that does not bring everything is refused."""
    case, plan = simple()
    [box] = boxes_of(case, plan)
    Assembly(box, {"w0": ([(0, 8)], None)})
    less = ReceivePlan(box.host_leader, box.workers, box.limit, box.tensors, box.rounds[1:])
    with pytest.raises(ValueError, match=r"w0: .* \d+ elements, this worker needs 64"):
        Assembly(less, {"w0": ([(0, 8)], None)})


# ---- parts of tensors


def test_part_is_narrowed_like_the_whole() -> None:
    """A part is narrowed like the whole and never invented."""
    full = torch.arange(96.0).view(12, 8)
    mine = part_tensor((12, 8), torch.cat([full[2:4], full[8:10]]), [(2, 2), (8, 2)], None)
    assert isinstance(mine, PartTensor)
    assert mine.shape == (12, 8)
    assert torch.equal(mine.narrow(0, 2, 2), full[2:4])
    assert torch.equal(mine.narrow(0, 6, 6).narrow(0, 2, 2), full[8:10]), "as loaders of fused matrices do"
    assert torch.equal(mine[8:10, 3:5], full[8:10, 3:5])
    target = torch.zeros(4, 8)
    for missing in (mine, mine.narrow(0, 1, 4)):
        with pytest.raises((PartMissing, RuntimeError)):
            target[: missing.shape[0]].copy_(missing)
    with pytest.raises(PartMissing):
        mine + 1
    columns = part_tensor((12, 8), full[:, 4:6].contiguous(), [(0, 12)], (4, 2))
    assert torch.equal(columns.narrow(1, 4, 2), full[:, 4:6])
    assert torch.equal(columns.unsqueeze(0)[0].narrow(1, 4, 2), full[:, 4:6])
    assert [torch.equal(x.narrow(1, 5, 1), full[:, 5:6]) for x in columns.unsqueeze(0)] == [True]
    assert part_tensor((12, 8), full, [(0, 12)], (0, 8)) is full


# ---- FP8 in pieces


@pytest.mark.parametrize(
    "scheme", [Scheme("block", (16, 32)), Scheme("block", (16, 32), True), Scheme("channel"), Scheme("tensor")]
)
@pytest.mark.parametrize("columns", [False, True])
def test_codes_and_scales_of_parts(scheme: Scheme, columns: bool) -> None:
    """Codes and scales of parts are those of the whole."""
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(40, 72, generator=generator).bfloat16()
    full[3] = 0
    name = "x.up_proj.weight"
    halves = [(0, 36), (36, 72)] if columns else [(0, 20), (20, 40)]
    own = []
    for begin, end in halves:
        place = SourceRectangle(0, (0, 40), (begin, end), 0) if columns else SourceRectangle(0, (begin, end), None, 0)
        own.append(OwnTensor(full[place.index].clone(), [place], 0, (40, 72)))
    largest = torch.maximum(*(largest_values(tensor, scheme) for tensor in own))
    whole_codes, whole_scales = scheme.quantize(name, full)

    def agree(values: list[tuple[str, torch.Tensor]]) -> None:
        values[0][1].copy_(largest)

    dtypes = {name: "float8_e4m3fn", scheme.scale_name(name): "float32"}
    for tensor, (begin, end) in zip(own, halves, strict=True):
        numbers = prepare_values({name: tensor}, dtypes, scheme, agree)
        area = (5, 33, begin + 3, end - 1) if columns else (begin + 3, end - 1, 5, 60)
        codes = torch.empty(area[1] - area[0], area[3] - area[2], dtype=torch.float8_e4m3fn)
        numbers.write(name, area, codes)
        wanted = whole_codes[area[0] : area[1], area[2] : area[3]]
        assert torch.equal(codes.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        scales = torch.empty(whole_scales.view(len(whole_scales), -1).shape)
        numbers.write(scheme.scale_name(name), (0, scales.shape[0], 0, scales.shape[1]), scales)
        assert torch.equal(scales.view(whole_scales.shape), whole_scales)


def test_each_update_has_scales_of_its_own() -> None:
    """Codes under the scales of an earlier update would be other numbers."""
    name, scheme = "x.up_proj.weight", Scheme("block", (16, 32))
    full = torch.randn(32, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    place = SourceRectangle(0, (0, 32), None, 0)
    found = []
    for value in (full, 3 * full):
        numbers = prepare_values({name: OwnTensor(value, [place], 0, (32, 64))}, {}, scheme, lambda _: None)
        found.append(torch.empty(2, 2))
        numbers.write(scheme.scale_name(name), (0, 2, 0, 2), found[-1])
        assert torch.equal(found[-1], scheme.quantize(name, value)[1])
    assert (found[1] > 2 * found[0]).all()


def test_what_only_one_side_has_is_an_error() -> None:
    held = {"a": HeldTensor((4, 4), (whole((4, 4), (0,)),))}
    assert set(coded({"a.up_proj.weight": held["a"]}, Scheme())) == {"a.up_proj.weight", "a.up_proj.weight_scale_inv"}

    def manifest(**shapes: tuple[int, ...]) -> list[list[dict[str, object]]]:
        fields = {"dtype": "float32", "columns": None, "same_as": None}
        tensors = {name: {"shape": list(s), "rows": [[0, s[0]]], **fields} for name, s in shapes.items()}
        return [[{"worker": "0.0", "where": "e", "tensors": tensors, "opaque": [], "unseen": {}}]]

    assert layouts_of(held, manifest(a=(4, 4))).shapes == [(4, 4)]
    for shapes, message in (
        ({}, "trainer's a is not"),
        ({"a": (4, 4), "b": (1,)}, "lacks 1 tensors .* b"),
    ):
        with pytest.raises(HpcrlError, match=message):
            layouts_of(held, manifest(**shapes, **({} if shapes else {"c": (1,)})))
    with pytest.raises(HpcrlError, match=r"shape \[4, 4\], the engines need \[4, 5\]"):
        layouts_of(held, manifest(a=(4, 5)))


def test_engines_that_are_alike_are_read_once() -> None:
    """Workers with the same manifest need the same, at any place; one that differs needs what it says."""

    def worker(*rows: list[int]) -> dict[str, object]:
        held = {"shape": [4, 4], "dtype": "float32", "rows": list(rows), "columns": None, "same_as": None}
        return {"where": "e", "tensors": {"a": held}, "opaque": [], "unseen": {}}

    top, bottom = worker([0, 2]), worker([2, 2])
    manifests = [[top, bottom], [top, bottom], [top, worker([3, 1])], [top, bottom, worker([0, 4])]]
    made = layouts_of({"a": HeldTensor((4, 4), (whole((4, 4), (0,)),))}, manifests)
    needed = {(part.rows, part.who) for part in made.patterns[made.needed[0]]}
    assert needed == {((0, 2), (0, 2, 4, 6)), ((2, 4), (1, 3, 7)), ((3, 4), (5,)), ((0, 4), (8,))}
