"""Every NCCL communicator ends: a stand-in for vLLM's binding hangs, loses members, and counts those that are open."""

from __future__ import annotations

import base64
import contextlib
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.utils.waiting import Deadline, poll
from hpcrl.weights.pieces import piece_update
from hpcrl.weights.pieces.choose_transport import choose_transport
from hpcrl.weights.pieces.device_transport import DeviceTransport, NcclWire
from hpcrl.weights.pieces.peer_transport import LEFT
from hpcrl.weights.pieces.planning import HeldTensor
from hpcrl.weights.pieces.wire import DATA, UpdateGroup
from hpcrl.weights.redistribution.layouts import whole
from tests.weights.pieces.test_pieces import closed, members  # noqa: F401

DEVICE = torch.device("cpu")


class Nccl:
    """All communicators of a test.

    Attributes:
        open: those that were made and not aborted; made: how many there were.
        hangs: their calls return only once they are aborted, as those of a member whose peer never comes.
        late: seconds until one is made.
    """

    def __init__(self) -> None:
        self.open = set[Communicator]()
        self.made = 0
        self.hangs = False
        self.late = 0.0

    def join(self, name: bytes, rank: int, world: int, device: torch.device) -> Communicator:
        time.sleep(self.late)
        made = Communicator(self)
        self.open.add(made)
        self.made += 1
        return made


class Communicator:
    """As vLLM's PyNcclCommunicator."""

    def __init__(self, nccl: Nccl) -> None:
        self.nccl = nccl
        self.aborted = threading.Event()

    def group_start(self) -> None: ...

    def send(self, tensor: torch.Tensor, member: int, stream: Any) -> None: ...

    recv = send

    def group_end(self) -> None:
        if self.nccl.hangs:
            assert self.aborted.wait(30), "nobody has ended it"

    def destroy(self) -> None:
        self.aborted.set()
        self.nccl.open.discard(self)


class Event:
    """One that the device never reaches: its peer is gone."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return False


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """In the place of vLLM's binding, and of CUDA's streams."""
    found = Nccl()
    module = types.ModuleType("nccl_common")
    module.uid_init_process_group = found.join
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def ends(nccl: Nccl, seconds: float) -> list[DeviceTransport]:
    """A rank and a worker."""
    return [
        DeviceTransport(one.group, one.me, 1, seconds, wire=NcclWire(b"", one.me, 2, DEVICE)) for one in members(2, 1)
    ]


def test_a_peer_that_never_connects(nccl: Nccl) -> None:
    """A call of NCCL's that does not return ends at the deadline, and with it the communicator and its thread."""
    nccl.hangs = True
    rank, worker = ends(nccl, 0.5)
    with pytest.raises(DeadlineError, match="exchanging weights did not"):
        exchange(rank)
    rank.close()
    worker.close()
    assert not nccl.open


def exchange(rank: DeviceTransport) -> None:
    moved = rank.send(torch.zeros(4, dtype=torch.uint8), 1, DATA)
    rank.flush()
    moved.wait()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_peer_that_leaves(nccl: Nccl, hangs: bool) -> None:
    """An engine that is lost in the middle ends the wait of the rank, in NCCL's call or for the device, at once."""
    nccl.hangs = hangs
    rank, worker = ends(nccl, 30)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(lambda: (time.sleep(0.2), worker.close()))
        with pytest.raises(PeerError, match="a member left"):
            exchange(rank)
        leaving.result(10)
    rank.close()
    assert not nccl.open


def test_a_communicator_that_comes_too_late(nccl: Nccl) -> None:
    """A member that gave up joining ends what comes of it after all; one that joined has it until it leaves."""
    nccl.late = 1.0
    group = members(2, 1)[0].group
    name = base64.b64encode(bytes(128)).decode()
    with pytest.raises(DeadlineError, match="joined NCCL within"):
        choose_transport(group, 0, UpdateGroup("h", 1, 1, 1, 0.2, name), DEVICE)
    made = choose_transport(group, 0, UpdateGroup("h", 1, 1, 1, 20, name), DEVICE)
    assert poll(lambda: len(nccl.open) == 1, Deadline(20), 0.01), "the first one is not gone"
    made.close()
    assert not nccl.open


def test_joining_ends_when_a_member_leaves(nccl: Nccl) -> None:
    """Of members of which one will never come to NCCL, the others know from the store, long before the deadline."""
    nccl.late = 2.0
    mine, other = members(2, 1)
    other.group.store.set(LEFT, "1")
    with pytest.raises(PeerError, match="a member left"):
        choose_transport(mine.group, 0, UpdateGroup("h", 1, 1, 1, 60, base64.b64encode(bytes(128)).decode()), DEVICE)
    deadline = Deadline(20)
    while (nccl.made == 0 or nccl.open) and not deadline.over:
        time.sleep(0.05)
    assert nccl.made == 1 and not nccl.open, "what came of it after all is ended"


class SamplingFleet:
    """One engine that samples until it is paused, and asks of every call to a worker whether it does.

    Attributes:
        joined: whether it sampled while its worker, and the ranks, joined.
    """

    engines = (None,)
    seconds = 20.0

    def __init__(self) -> None:
        self.samples = True
        self.joined: list[bool] = []

    def post(self, phase: str, path: str, body: Any = None) -> None:
        self.samples = self.samples and not path.startswith("/pause")

    def post_all(self, phase: str, path: str, bodies: list[dict[str, Any]]) -> Any:
        self.joined.append(self.samples)
        done: Future[Any] = Future()
        done.set_result({"results": [{"joined": True}]})
        return types.SimpleNamespace(futures=[done], check=lambda: None, results=lambda: [done.result()])


@pytest.mark.parametrize(
    ("backend", "shared", "samples"),
    [("hpcrl_nccl", False, False), ("hpcrl_nccl", True, True), ("hpcrl_gloo", False, True)],
)
def test_nothing_is_sampled_as_communicators_are_made(
    monkeypatch: pytest.MonkeyPatch, backend: str, shared: bool, samples: bool
) -> None:
    """Its kernels and NCCL's start could wait for each other; an engine that takes turns sleeps, and is not paused."""
    monkeypatch.setattr(piece_update, "unique_id", lambda: b"name")
    need = {"shape": [8, 4], "dtype": "float32", "same_as": None, "rows": [[0, 8]], "columns": None}
    worker = {"worker": "w", "where": "b", "backend": backend, "opaque": [], "unseen": {}, "tensors": {"t": need}}
    options = Options(colocate=shared, rollout_num_gpus=1)
    fleet = SamplingFleet()
    update = piece_update.PieceUpdate(fleet, [[worker]], options, None, "127.0.0.1")
    source = types.SimpleNamespace(
        describe=lambda: ({"t": HeldTensor((8, 4), (whole((8, 4), [0]),))}, ["a"]),
        join=lambda command, plan: fleet.joined.append(fleet.samples),
        abort=lambda: None,
    )
    update._connect(source)
    update.forget()
    assert len(fleet.joined) > 1 and set(fleet.joined) == {samples}
