"""Parts that loaders read in memory of others: each element right whatever is kept, and nobody's memory read after its
DONE."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hpcrl.engine.pieces.borrowed_view import BorrowedPart, BorrowedView
from hpcrl.engine.pieces.part_tensor import PartTensor
from hpcrl.engine.pieces.piece_receiver import PieceReceiver
from hpcrl.models.slicing import SourceRectangle
from hpcrl.weights.pieces.peer_transport import PeerTransport, Transfer
from hpcrl.weights.pieces.wire import DONE
from hpcrl.weights.redistribution.layouts import Layouts, TensorPart, Worker, whole
from hpcrl.weights.redistribution.plan import Redistribution, redistribute
from tests.support.layouts import Case
from tests.weights.pieces.test_pieces import boxes_of, closed, members, rank_side, simple, worker_side

__all__ = ["closed"]


def borrowed(full: torch.Tensor) -> BorrowedPart:
    """All of a matrix of 6 x 8, in three tiles."""
    found = BorrowedPart((6, 8), full.dtype, lambda size: torch.empty(size, dtype=torch.uint8))
    for rows, columns in (((0, 2), (0, 8)), ((2, 6), (0, 5)), ((2, 6), (5, 8))):
        where = slice(*rows), slice(*columns)
        found.add(where, full[where])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_lent_part_is_copied_out_of_its_tiles(dtype: torch.dtype) -> None:
    full = torch.arange(48).view(6, 8).to(dtype)
    handed_out = BorrowedView(borrowed(full))
    target = torch.zeros(6, 8, dtype=dtype)
    assert torch.equal(target.copy_(handed_out), full)
    narrow = handed_out.narrow(0, 1, 4)[:, 3:7]
    assert isinstance(narrow, BorrowedView)
    parameter = torch.nn.Parameter(torch.zeros(8, 6, dtype=dtype).t(), requires_grad=False)  # its rows lie apart
    parameter.data[1:5, 3:7].copy_(narrow)
    assert torch.equal(parameter[1:5, 3:7], full[1:5, 3:7])
    assert int((parameter != 0).sum()) == 16
    wide = torch.zeros(6, 8, dtype=torch.float64)
    assert torch.equal(wide.copy_(handed_out).to(dtype), full), "a parameter of another dtype"
    torch.empty(6, 8, dtype=dtype, device="meta").copy_(handed_out)
    assert handed_out.borrowed._own is None, "copying makes none of its own"


def test_results_own_their_memory() -> None:
    """Whatever else is done to a borrowed part has memory of its own."""
    full = torch.arange(48.0).view(6, 8)
    wanted = full.clone()
    for work in (
        lambda t: t.t(),
        lambda t: t.view(-1),
        lambda t: t[3],
        lambda t: t + 0,
        lambda t: t.to(torch.float64),
        lambda t: t[::2],
    ):
        full.copy_(wanted)
        found = work(BorrowedView(borrowed(full)))
        assert not isinstance(found, BorrowedView)
        full.zero_()
        assert torch.equal(found, work(wanted))


def one_host(limit: int) -> tuple[Case, Redistribution]:
    """Two ranks with half of the rows of each matrix, a worker with columns 2 to 6 of it and one with all, on one
    host."""
    layouts = Layouts()
    case = Case(["t", "t"], [Worker(0, "t"), Worker(0, "t")])
    for number in range(6):
        name = f"w{number}"
        case.tensors[name] = torch.arange(64, dtype=torch.int32).view(8, 8).numpy() + 100 * number
        held = layouts.pattern([TensorPart((0, 4), (0, 8), (0,)), TensorPart((4, 8), (0, 8), (1,))])
        layouts.add(name, (8, 8), 4, held, layouts.pattern([TensorPart((0, 8), (2, 6), (0,)), whole((8, 8), (1,))]))
        for rank in range(2):
            case.parts[rank, name] = (
                case.tensors[name][4 * rank : 4 * rank + 4],
                [SourceRectangle(0, (4 * rank, 4 * rank + 4), None, 0)],
                0,
            )
        case.spans[0, name] = [(0, 8)], (2, 4)
        case.spans[1, name] = [(0, 8)], None
    case.layouts = layouts
    return case, redistribute(layouts, case.workers, case.hosts, limit, in_place=True)


def carry_out(case: Case, plan: Redistribution, loads: list[Any], updates: int = 1) -> list[PieceReceiver]:
    """Updates of which each is larger by one; loads: of each worker, as `PieceReceiver.receive` calls it."""
    plans, posts = boxes_of(case, plan), members(4, 2)

    def rank(transport: PeerTransport) -> None:
        sender, numbers = rank_side(case, plan, plans, transport)
        for _ in range(updates):
            sender.send(numbers)
            for tensor in numbers.own.values():
                tensor.parameter.add_(1)

    readers = [worker_side(case, plan, plans, transport) for transport in posts[2:]]

    def worker(reader: PieceReceiver, load: Any) -> None:
        for _ in range(updates):
            reader.receive(load)

    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(rank, transport) for transport in posts[:2]]
        taken = [pool.submit(worker, reader, load) for reader, load in zip(readers, loads, strict=True)]
        for future in (*sent, *taken):
            future.result(30)
    return readers


def test_loaders_copy_from_ranks_memory() -> None:
    """Three rounds of two matrices, twice: one worker copies at once, the other keeps them all to the end."""
    case, plan = one_host(256)
    assert plan.rounds == 3
    parameters = {name: torch.zeros(8, 4) for name in case.tensors}
    kept: list[tuple[str, torch.Tensor]] = []

    def copies(tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
        for name, tensor in tensors:
            assert isinstance(tensor, PartTensor)
            parameters[name].copy_(tensor.narrow(1, 2, 4))

    def keeps(tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
        assert all(isinstance(tensor, BorrowedView) for _, tensor in tensors)
        kept.extend(tensors)

    first, second = carry_out(case, plan, [copies, keeps], updates=2)
    assert first.assembly.most == second.assembly.most == 0
    assert not first.assembly.memory.free, "no memory beside the model"
    for name, tensor in case.tensors.items():
        assert torch.equal(parameters[name], torch.from_numpy(tensor).float()[:, 2:6] + 1)
    assert len(kept) == 12
    for number, (name, tensor) in enumerate(kept):
        assert torch.equal(tensor + 0, torch.from_numpy(case.tensors[name]).float() + number // 6), name


def test_matrix_over_two_rounds() -> None:
    """A matrix that is split over two rounds is put together as usual."""
    case, plan = one_host(64)
    assert plan.rounds == 12
    found: list[dict[str, torch.Tensor]] = [{}, {}]
    readers = carry_out(case, plan, [lambda t, last: found[0].update(t), lambda t, last: found[1].update(t)])
    assert not readers[0].assembly.borrowable
    for name, tensor in case.tensors.items():
        assert torch.equal(found[0][name].narrow(1, 2, 4), torch.from_numpy(tensor).float()[:, 2:6])
        assert torch.equal(found[1][name], torch.from_numpy(tensor).float())


@pytest.mark.parametrize("fails", [False, True])
def test_done_after_load_and_late_failure(
    fails: bool,
) -> None:
    """Done is reported once a round is loaded; a load that fails at the end is not the rank's failure."""
    case, _ = simple()
    case.workers = [Worker(0, "t")]
    plan = redistribute(case.layouts, case.workers, case.hosts, 256, in_place=True)
    plans, (rank, worker) = boxes_of(case, plan), members(2, 1)
    order: list[str] = []

    class Awaited(Transfer):
        def wait(self) -> torch.Tensor:
            order.append("heard")
            return super().wait()

    class Noted(PeerTransport):
        def tell(self, to: int, tag: int) -> Transfer:
            order.append("done" if tag == DONE else "word")
            told = super().tell(to, tag)
            return Awaited(told.work, told.tensor, told.what, told.seconds)

    def load(tensors: list[tuple[str, torch.Tensor]], last: bool) -> None:
        order.append("load")
        if fails and last:
            raise ValueError("no such tensor")

    reader = worker_side(case, plan, plans, Noted(worker.group, worker.me, 1, 20))
    with ThreadPoolExecutor(1) as pool:
        sender, numbers = rank_side(case, plan, plans, rank)
        sending = pool.submit(sender.send, numbers)
        if fails:
            with pytest.raises(ValueError, match="no such tensor"):
                reader.receive(load)
        else:
            reader.receive(load)
        assert sending.result(20) == 4 * 64 * 4
    assert order == ["load", "done", "heard"] * 4, "who leaves before that takes the word with it"
