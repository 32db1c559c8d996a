"""Trainer ranks (TP 2, two copies; rows are cut) and engine workers (TP 2; columns are cut), each a process with one
thread.

They are the real sender and receiver.  vLLM's loaders are left out of all: a worker copies its part of what it got into its parameters, as
they do.

Invariant: after the last update every worker holds exactly what the ranks had.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.weights_roles.hosts import Host
from hpcrl.engine.pieces.piece_receiver import PieceReceiver
from hpcrl.models.slicing import SourceRectangle
from hpcrl.weights.pieces.elements import OwnTensor, PieceValues
from hpcrl.weights.pieces.messages import pieces_of, receive_plans, to_bytes
from hpcrl.weights.pieces.peer_transport import PeerTransport, join_group
from hpcrl.weights.pieces.piece_sender import PieceSender, SendTarget
from hpcrl.weights.redistribution.layouts import Layouts, TensorPart, Worker
from hpcrl.weights.redistribution.plan import Redistribution, redistribute

#: BYTES of bf16
RANKS = 4
ROWS = 1024
COLUMNS = 4096
BYTES = 2
TP = 2  #: of an engine
HALF = COLUMNS // TP
LIMIT = 300.0  #: seconds of any wait
CHANGED = 100  #: one of so many elements changes from update to update


@dataclass(frozen=True)
class Stage:
    """What all processes share.

    near: ranks and workers on one host map each other's memory; hosts: of each member, ranks first, or none for all on
    this machine; port: of the store where they meet.
    """

    tensors: int
    rounds: int
    engines: int
    store: str
    port: int
    near: bool
    bucket: int
    hosts: tuple[Host, ...]
    barrier: Any
    results: Any

    @property
    def workers(self) -> int:
        return self.engines * TP

    def host(self, member: int) -> str:
        """Ranks are one a host, engines too."""
        if not self.hosts:
            return "here" if self.near or member < RANKS else f"engine {(member - RANKS) // TP}"
        return self.hosts[member if member < RANKS else RANKS + (member - RANKS) // TP].address

    def address(self, member: int) -> str:
        return self.host(member) if self.hosts else "127.0.0.1"


def plan_of(stage: Stage) -> Redistribution:
    layouts = Layouts()
    halves = [TensorPart((i * ROWS // 2, (i + 1) * ROWS // 2), (0, COLUMNS), (i, i + 2)) for i in range(2)]
    held = layouts.pattern(halves)
    each = [TensorPart((0, ROWS), (i * HALF, (i + 1) * HALF), tuple(range(i, stage.workers, TP))) for i in range(TP)]
    needed = layouts.pattern(each)
    for number in range(stage.tensors):
        layouts.add(f"w{number}", (ROWS, COLUMNS), BYTES, held, needed)
    workers = [Worker(i // TP, stage.host(RANKS + i)) for i in range(stage.workers)]
    return redistribute(layouts, workers, [stage.host(i) for i in range(RANKS)], stage.bucket // 2, stage.near)


def join(stage: Stage, me: int) -> PeerTransport:
    torch.set_num_threads(1)
    group = join_group(stage.store, stage.port, me, RANKS + stage.workers, stage.address(me), LIMIT)
    return PeerTransport(group, me, RANKS, LIMIT)


def half_of(number: int, half: int) -> torch.Tensor:
    """Rows of one half of a tensor, as they are before the first update."""
    chance = torch.Generator().manual_seed(1000 * number + half)
    return torch.randn(ROWS // 2, COLUMNS, generator=chance).bfloat16()


def change(parts: list[torch.Tensor], turn: int) -> None:
    """What a step of the optimizer does to them, if only a hundredth changes."""
    for part in parts:
        part.view(-1)[turn % CHANGED :: CHANGED] += 1


def timed(stage: Stage, me: int, work: Callable[[], None], before: Callable[[int], None] = lambda _: None) -> None:
    """All rounds; rank 0 reports the seconds of each, and everybody the processor's seconds."""
    found, spent = [], []
    for turn in range(stage.rounds + 1):
        before(turn)
        stage.barrier.wait(LIMIT)
        begin, used = time.perf_counter(), _used()
        work()
        spent.append(_used() - used)
        stage.barrier.wait(LIMIT)
        found.append(time.perf_counter() - begin)
    stage.results.put((me, found[1:] if me == 0 else [], sum(spent[1:]) / stage.rounds))


def _used() -> float:
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime


def check(stage: Stage, me: int, params: dict[str, torch.Tensor]) -> None:
    """A worker holds what the ranks have after the last round."""
    mine = (me - RANKS) % TP
    for number in (0, stage.tensors - 1):
        halves = [half_of(number, half) for half in range(2)]
        for turn in range(stage.rounds + 1):
            change(halves, turn)
        assert torch.equal(params[f"w{number}"], torch.cat(halves)[:, mine * HALF : (mine + 1) * HALF]), number


def member(stage: Stage, me: int) -> None:
    """What a process does."""
    if stage.hosts:
        stage.hosts[me if me < RANKS else RANKS + (me - RANKS) // TP].enter()
    if me >= RANKS:
        pieces_worker(stage, me)
    else:
        pieces_rank(stage, me)


def _boxes(plan: Redistribution) -> list[Any]:
    names = plan.layouts.names
    return receive_plans(plan, dict.fromkeys(names, "bfloat16"), dict.fromkeys(names, (ROWS, COLUMNS)))


def pieces_rank(stage: Stage, me: int) -> None:
    post, plan = join(stage, me), plan_of(stage)
    to = [
        SendTarget(stage.near and destination.host == stage.host(me), box.host_leader, box.workers)
        for destination, box in zip(plan.destinations, _boxes(plan), strict=True)
    ]
    place = [SourceRectangle(0, (me % 2 * ROWS // 2, (me % 2 + 1) * ROWS // 2), None, 0)]
    parts = [half_of(n, me % 2) for n in range(stage.tensors)]
    own = {f"w{n}": OwnTensor(part, place, 0, (ROWS, COLUMNS)) for n, part in enumerate(parts)}
    numbers = PieceValues(own, dict.fromkeys(own, "bfloat16"), None, {})
    sender = PieceSender(post, pieces_of(me, to_bytes(plan)), plan.layouts.names, to, plan.limit)

    def work() -> None:
        sender.send(numbers)

    timed(stage, me, work, lambda turn: change(parts, turn))


def pieces_worker(stage: Stage, me: int) -> None:
    post, plan = join(stage, me), plan_of(stage)
    mine = (me - RANKS) % TP
    held = {name: ([(0, ROWS)], (mine * HALF, HALF)) for name in plan.layouts.names}
    params = {name: torch.zeros(ROWS, HALF, dtype=torch.bfloat16) for name in held}
    box = next(box for box in _boxes(plan) if me in box.workers)
    reader = PieceReceiver(post, box, held)

    def load(tensors: list[tuple[str, Any]], last: bool) -> None:
        for name, tensor in tensors:
            params[name].copy_(tensor.narrow(1, mine * HALF, HALF))

    timed(stage, me, lambda: reader.receive(load))
    check(stage, me, params)
