"""The driver's side of a resharded update: the plan made once, then for every update the engines told to take their
pieces.

    pieces = PiecesTransport(fleet, manifests, options, scheme, host)
    pieces.connect(source)        # who holds what -> the plan; all members meet
    pieces.send(source)           # every rank sends, the engines receive and load; returns bytes sent by all ranks

Invariant: while the ranks send, what the engines say is watched, so an engine that refuses or dies ends the update at
once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hpcrl.config.options import Options
from hpcrl.errors import PeerError, UsageError
from hpcrl.queue.auth import server_keys
from hpcrl.redistribution.plan import Redistribution
from hpcrl.rendezvous.server import StoreServer
from hpcrl.weights.engine_fleet import GLANCE, EngineLost, Fleet, PendingCalls, in_thread
from hpcrl.weights.fp8 import Scheme
from hpcrl.weights.pieces.outbox import Addressee
from hpcrl.weights.pieces.planning import HeldTensor, Manifests, check_codes, coded, inboxes, make, to_bytes, wanted
from hpcrl.weights.pieces.wire import Inbox, Invitation, Meeting, known
from hpcrl.weights.route import IPC, NCCL, SHM, TAKES_PIECES, whole_tensors
from hpcrl.weights.transports.nccl import unique_id

if TYPE_CHECKING:
    import torch

ENDING = 30.0  #: seconds that the ranks may take to notice that an update has failed


@runtime_checkable
class Source(Protocol):
    """The trainer's ranks, as rank 0 directs them (`hpcrl/trainer/weight_export.py`)."""

    def describe(self) -> tuple[dict[str, HeldTensor], list[str]]:
        """Who holds which part of each tensor, and the whereabouts of each rank."""

    def join(self, errand: dict[str, Any], plan: bytes) -> None:
        """Every rank meets the workers, and keeps its part of the plan."""

    def prepare(self) -> None:
        """What can be done while engines still generate."""

    def send(self, changes: bool) -> int:
        """Every rank sends its pieces once, or what has changed of them; bytes of them all."""

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every whole tensor, valid on rank 0."""

    def end(self) -> None:
        """Nothing more is asked of the ranks in this update."""

    def abort(self) -> None:
        """From another thread: have what is under way on rank 0 fail."""


class MemberFailed(PeerError):
    """Somebody did not take part to the end; who was the first cannot be told from it."""


class PiecesTransport:
    """Resharded updates to one fleet."""

    def __init__(self, fleet: Fleet, manifests: Manifests, options: Options, scheme: Scheme | None, host: str) -> None:
        self.fleet = fleet
        self.manifests = manifests
        self.options = options
        self.scheme = scheme
        self.host = host
        self.plan: Redistribution | None = None
        self.meeting: StoreServer | None = None
        self.keep = options.weight_update == "delta"
        self.current = False  #: everybody has kept what the last update brought
        self.bytes = 0

    def connect(self, source: Source) -> None:
        """Make the plan and meet, before the first update.  HpcrlError for tensors that only one side has."""
        if self.plan is not None:
            return
        held, hosts = source.describe()
        backend = self.manifests[0][0]["backend"]
        limit = self.options.update_weight_buffer_size
        needs = wanted(self.manifests)
        check_codes(held, needs, self.scheme)
        plan = make(
            coded(held, self.scheme), self.manifests, hosts, limit, TAKES_PIECES[backend], in_place=backend == SHM
        )
        dtypes = {n: need.dtype for n, need in needs.items()}
        shapes = {n: need.shape for n, need in needs.items()}
        boxes = inboxes(plan, dtypes, shapes)
        if backend == IPC:
            _check_near(boxes, plan.ranks)
        self._leave()
        self.current = False
        self.meeting = StoreServer(self.host, server_keys(self.fleet.rundir, "weights"))
        workers = sum(len(engine) for engine in self.manifests)
        nccl = base64.b64encode(unique_id()).decode() if backend == NCCL else ""
        meeting = Meeting(
            self.host, self.meeting.port, plan.ranks + workers, plan.ranks, self.fleet.seconds, nccl, backend == IPC
        )
        bodies = [{"method": "hpcrl_join", "args": [text]} for text in self._invitations(plan, boxes, meeting)]
        pending = self.fleet.begin("the meeting for weights", "/collective_rpc", bodies)
        errand = {
            "meeting": meeting,
            "names": plan.layouts.names,
            "dtypes": dtypes,
            "addressees": [_addressees(plan, boxes, rank) for rank in range(plan.ranks)],
            "limit": plan.limit,
            "keep": self.keep,
        }
        self._watched(source, lambda: source.join(errand, to_bytes(plan)), pending)
        pending.results()
        self.plan = plan

    def _invitations(self, plan: Redistribution, boxes: list[Inbox], meeting: Meeting) -> list[str]:
        """One for each engine, with the inboxes of its workers."""
        landing_of = {worker: number for number, landing in enumerate(plan.landings) for worker in landing.workers}
        found, first = [], 0
        for engine in self.manifests:
            used = sorted({landing_of[first + at] for at in range(len(engine))})
            places = {
                str(worker["rank"]): (plan.ranks + first + at, used.index(landing_of[first + at]))
                for at, worker in enumerate(engine)
            }
            found.append(known(Invitation(meeting, tuple(boxes[number] for number in used), places, self.keep)))
            first += len(engine)
        return found

    def send(self, source: Source) -> None:
        """One update, between the engines' start and finish; with --weight-update delta, from the second one after a
        meeting, of what has changed.  PeerError or DeadlineError name engine and phase.
        """
        changes = self.current
        self.current = False
        body = {"method": "hpcrl_take_pieces", "args": ["changes"] if changes else []}
        pending = self.fleet.begin("the weight update", "/collective_rpc", [body] * len(self.fleet.engines))
        self.bytes = self._watched(source, lambda: source.send(changes), pending)
        pending.results()
        self.current = self.keep

    def _watched(self, source: Source, work: Callable[[], Any], pending: PendingCalls) -> Any:
        """What `work` returns; if the engines fail meanwhile, it is made to end before that is raised."""
        future = in_thread(work)
        try:
            while wait([future], timeout=GLANCE / 2).not_done:
                pending.check()
            return future.result()
        except BaseException as error:
            self.plan = None  # a group in which something failed is not used again
            source.abort()
            wait([future, *pending.futures], timeout=ENDING)
            if isinstance(error, PeerError) and not isinstance(error, EngineLost):
                raise MemberFailed(_causes(error, pending)) from error
            raise

    def forget(self) -> None:
        """The next update begins with a plan and a meeting: after a failure the engines have left."""
        self.plan = None
        self._leave()

    def _leave(self) -> None:
        if self.meeting is not None:
            self.meeting.close()
            self.meeting = None


def _addressees(plan: Redistribution, boxes: list[Inbox], rank: int) -> list[Addressee]:
    return [
        Addressee(plan.hosts[rank] == landing.host, box.porter, box.workers)
        for landing, box in zip(plan.landings, boxes, strict=True)
    ]


def _check_near(boxes: list[Inbox], ranks: int) -> None:
    """UsageError unless every message lies where its workers can open it."""
    for box in boxes:
        for message in box.messages():
            if not message.near:
                raise UsageError(
                    f"--weight-transfer ipc: engine worker {box.porter - ranks} cannot open the memory of trainer rank {message.sender}: "
                    "they are on different hosts, or in containers that do not share their processes",
                    "use --weight-transfer auto",
                )


def obstacle(tensors: object, manifests: Manifests, data_parallel: int, delta: bool = False) -> str | None:
    """Why an update cannot be resharded, as the end of a sentence; None if it can.

    data_parallel: parts of an engine; delta: it is to bring what has changed.
    """
    first = manifests[0][0]
    if not isinstance(tensors, Source):
        return "the weights do not come from trainer ranks"
    if why := whole_tensors(first["backend"], data_parallel, delta):
        return why
    if first["opaque"] and not first["unseen"]:
        return f"how the engines hold {first['opaque'][0]}* is not known"
    return None


def _causes(error: PeerError, pending: PendingCalls) -> str:
    """What failed, and what the engines that have answered say of it."""
    said = [str(e) for future in pending.futures if future.done() and (e := future.exception()) is not None]
    return "; ".join(dict.fromkeys([str(error), *said]))
