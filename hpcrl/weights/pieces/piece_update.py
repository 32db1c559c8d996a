"""The driver's side of an update in pieces: the plan is made once, then for every update the engines take their
pieces.

    update = PieceUpdate(fleet, manifests, options, scheme, host)
    update.stage(ranks, checked, compare)   # who holds what -> the plan; all members join a group; what can be packed
    update.send()                           # the ranks send, the engines receive and load

Invariant: while the ranks send, the engines' answers are watched, so an engine that refuses or dies ends the update at
once.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch.distributed import TCPStore

from hpcrl.config.options import Options
from hpcrl.engine.membership.broadcast import GLANCE, EngineBroadcast, EngineLost, PendingCalls, in_thread
from hpcrl.errors import DeadlineError, HpcrlError, PeerError, UsageError
from hpcrl.models.files.fp8 import Scheme, Stream, quantized
from hpcrl.run.role import say
from hpcrl.transport.torch_store import open_store
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.pieces.choose_transport import current_device, use_device
from hpcrl.weights.pieces.device_transport import unique_id
from hpcrl.weights.pieces.messages import receive_plans, to_bytes
from hpcrl.weights.pieces.piece_sender import JoinCommand, SendTarget
from hpcrl.weights.pieces.planning import (
    Manifests,
    Source,
    check_codes,
    coded,
    make,
    needed_tensors,
    sent_whole,
)
from hpcrl.weights.pieces.wire import ReceivePlan, UpdateGroup, WorkerJoinCommand, write_join_command
from hpcrl.weights.redistribution.plan import Redistribution, carriers
from hpcrl.weights.update_backend import IPC, NCCL, SHM, TAKES_PIECES

JOIN = "joining the group for weights"
LOOK = 0.02  #: seconds between two questions whether the workers have joined
ENDING = 30.0  #: seconds that the ranks may take to notice that an update has failed


class PieceUpdate:
    """Updates of one fleet, in pieces."""

    def __init__(
        self, fleet: EngineBroadcast, manifests: Manifests, options: Options, scheme: Scheme | None, host: str
    ) -> None:
        self.fleet = fleet
        self.manifests = manifests
        self.options = options
        self.scheme = scheme
        self.host = host
        self.plan: Redistribution | None = None
        self.store: TCPStore | None = None
        self.bytes = 0
        self.source: Source | None = None

    def stage(self, ranks: Source, checked: Callable[[Stream], Stream], compare: bool, version: int) -> None:
        """What can be done while engines still generate: the plan and the group, the first time; scales of FP8.

        Args:
            checked: the same tensors in the engines' dtypes, noted for a comparison.
            compare: every whole tensor is to go through `checked`.

        Raises:
            HpcrlError: for tensors that only one side has.
        """
        self.source = ranks
        self._connect(ranks)
        ranks.prepare()
        if compare:
            deque(checked(quantized(ranks.gathered(), self.scheme)), maxlen=0)

    def _connect(self, source: Source) -> None:
        """Make the plan and join the group, before the first update."""
        if self.plan is not None:
            return
        held, hosts = source.describe()
        backend = self.manifests[0][0]["backend"]
        needs = needed_tensors(self.manifests)
        check_codes(held, needs, self.scheme)
        if backend == IPC:
            _check_hosts(self.manifests, hosts)
        if names := sent_whole(self.manifests):
            say(
                f"{len(names)} of {len(needs)} tensors go whole to every worker, since vLLM's layers do not say which "
                f"part they need: {names[0]}{' and others' if len(names) > 1 else ''}"
            )
        plan = make(
            coded(held, self.scheme),
            self.manifests,
            hosts,
            self.options.update_weight_buffer_size,
            TAKES_PIECES[backend],
            in_place=backend == SHM,
            through_ranks=backend == IPC,
        )
        dtypes = {n: need.dtype for n, need in needs.items()}
        shapes = {n: need.shape for n, need in needs.items()}
        plans = receive_plans(plan, dtypes, shapes)
        self.store = open_store(self.host)
        workers = sum(len(engine) for engine in self.manifests)
        wired = backend == NCCL or (backend == IPC and bool(plan.far().any()))
        nccl = base64.b64encode(unique_id()).decode() if wired else ""
        update_group = UpdateGroup(
            self.host, self.store.port, plan.ranks + workers, plan.ranks, self.fleet.seconds, nccl, backend == IPC
        )
        if wired and not self.options.takes_turns:  # NCCL may wait for kernels of a sample that wait for other GPUs
            self.fleet.post("pausing", "/pause?mode=keep")
        bodies = [{"method": "hpcrl_join", "args": [text]} for text in self._join_commands(plan, plans, update_group)]
        pending = _Joining(self.fleet, bodies)
        targets = [send_targets(plan, plans, rank) for rank in range(plan.ranks)]
        command = JoinCommand(update_group, plan.layouts.names, dtypes, targets, plan.limit)
        self._watched(source, lambda: source.join(command, to_bytes(plan)), pending)
        pending.results()
        self.plan = plan

    def _join_commands(self, plan: Redistribution, plans: list[ReceivePlan], update_group: UpdateGroup) -> list[str]:
        """One for each engine, as text, with the receive plans of its workers."""
        destination_of = {
            worker: number for number, destination in enumerate(plan.destinations) for worker in destination.workers
        }
        found = []
        first = 0
        for engine in self.manifests:
            used = sorted({destination_of[first + at] for at in range(len(engine))})
            places = {
                worker["worker"]: (plan.ranks + first + at, used.index(destination_of[first + at]))
                for at, worker in enumerate(engine)
            }
            found.append(
                write_join_command(WorkerJoinCommand(update_group, tuple(plans[number] for number in used), places))
            )
            first += len(engine)
        return found

    def send(self) -> None:
        """One update, between the engines' start and finish.

        Raises:
            PeerError, DeadlineError: name engine and phase.
        """
        assert self.source is not None, "stage() comes first"
        source = self.source
        body = {"method": "hpcrl_take_pieces", "args": []}
        pending = self.fleet.post_all("the weight update", "/collective_rpc", [body] * len(self.fleet.engines))
        self.bytes = self._watched(source, source.send, pending)
        try:
            pending.results()
        except BaseException:  # the ranks have sent all: workers may still wait for one another
            self.plan = None
            source.abort()
            raise

    def _watched(self, source: Source, work: Callable[[], Any], pending: PendingCalls | _Joining) -> Any:
        def give_up() -> None:
            self.plan = None  # a group in which something failed is not used again
            source.abort()
            self.store = None  # members that meet in the store, or look at it, learn that nothing will come

        return watched(work, pending, give_up)

    def forget(self) -> None:
        """The next update begins with a new plan and group: after a failure the engines have left."""
        self.plan = self.store = None


def watched(work: Callable[[], Any], pending: Any, give_up: Callable[[], None]) -> Any:
    """What `work` returns; if it or the engines fail, `give_up` is called before that is raised.

    Args:
        work: of rank 0, done in a thread.
        pending: calls to engines that are under way: their `futures`, and `check`, which raises if one has failed, or
            is late.
        give_up: makes `work` fail if it is still under way.
    """
    device = current_device()

    def on_device() -> Any:
        with use_device(device):
            return work()

    future = in_thread(on_device)
    try:
        while wait([future], timeout=GLANCE / 2).not_done:
            pending.check()
        return future.result()
    except BaseException as error:
        give_up()
        wait([future, *pending.futures], timeout=ENDING)
        if not future.done():  # it may still be in a collective of the ranks, where nothing else can begin
            raise HpcrlError(f"the ranks did not abort an update within {ENDING:.0f} s: {error}") from error
        own = future.exception()
        says_why = isinstance(own, HpcrlError) and not isinstance(
            own, PeerError | DeadlineError
        )  # not that another left
        if own is not None and own is not error and says_why and not isinstance(error, EngineLost):
            raise own from error
        if isinstance(error, PeerError) and not isinstance(error, EngineLost):
            # what failed, and what the engines that have answered say of it
            said = [str(e) for call in pending.futures if call.done() and (e := call.exception()) is not None]
            raise PeerError("; ".join(dict.fromkeys([str(error), *said]))) from error
        raise


class _Joining:
    """Calls to engines until all workers have joined; of each round of them, all that `PendingCalls` can do."""

    def __init__(self, fleet: EngineBroadcast, bodies: list[dict[str, Any]]) -> None:
        self.fleet = fleet
        self.end = Deadline(fleet.seconds)
        self.pending = fleet.post_all(JOIN, "/collective_rpc", bodies)
        self.asked = self.there = False

    @property
    def futures(self) -> list[Future[Any]]:
        """Of the calls that are under way."""
        return self.pending.futures

    def check(self) -> None:
        """Raise as `PendingCalls.check`; ask those that have answered whether they are there."""
        self.pending.check()
        if self.there or not all(future.done() for future in self.futures):
            return
        answers = [worker for answer in self.pending.results() for worker in answer["results"]]
        self.there = self.asked and all(worker["joined"] for worker in answers)
        if not self.there and self.end.over:
            raise DeadlineError(f"not all workers joined the group for weights within {self.fleet.seconds:.0f} s")
        if not self.there:
            self.asked = True
            body = {"method": "hpcrl_joined", "args": []}
            self.pending = self.fleet.post_all(JOIN, "/collective_rpc", [body] * len(self.fleet.engines))

    def results(self) -> None:
        """Return once all have joined."""
        while not self.there:
            wait(self.futures, timeout=GLANCE / 2)
            self.check()
            time.sleep(LOOK)


def send_targets(plan: Redistribution, plans: list[ReceivePlan], rank: int) -> list[SendTarget]:
    """The destination hosts as a rank sees them."""
    takers = [box.host_leader for box in plans]
    if plan.through_ranks:
        takers = carriers(plan.hosts, plan.destinations)[rank].tolist()
    return [
        SendTarget(plan.hosts[rank] == destination.host, taker, box.workers)
        for destination, taker, box in zip(plan.destinations, takers, plans, strict=True)
    ]


def _check_hosts(manifests: Manifests, hosts: Sequence[str]) -> None:
    """Raise UsageError unless every worker is where it can open a trainer rank's memory."""
    for number, engine in enumerate(manifests):
        for worker in engine:
            if worker["where"] not in hosts:
                raise UsageError(
                    f"--weight-transfer ipc: worker {worker['worker']} of engine {number} cannot open the memory of "
                    "any trainer rank: it is on another host than all of them, or in a container of its own",
                    "use --weight-transfer gloo",
                )
