"""What ranks say over MPI, in a real world on this machine: typed both ways, and whatever else comes is an error that
names the rank that sent it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import PeerError
from hpcrl.launch.mpi.channel import FromLauncher, Message, Order, OrderState, Quit, pack, unpack
from hpcrl.launch.probe import HostReport, Network
from tests.support.able import find_mpirun, needs
from tests.support.runs import alive

pytestmark = [
    pytest.mark.process,
    needs("mpirun"),
]
ROOT = Path(__file__).parents[3]

BEFORE = """
import os, sys, time
from mpi4py import MPI
import msgspec
from hpcrl.errors import PeerError
from hpcrl.launch.mpi import channel as channels
from hpcrl.launch.mpi.channel import *

channel = Channel(MPI)

def raw(to, data):
    channel.world.Send([data, MPI.BYTE], dest=to)

def heard(count):
    found, end = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < end, found
        try:
            found += channel.receive()
        except PeerError as error:
            found.append(str(error))
        time.sleep(0.005)
    return found

def tell(text):
    os.write(1, f"{channel.rank}: {text}\\n".encode())  # in one piece, or the lines of two ranks are mixed

def part(last=OrderState(9, 0)):
    tell(f"parted {channel.close(last)}")
    MPI.Finalize()
    os._exit(0)
"""


def world(count: int, script: str) -> dict[int, list[str]]:
    """What each of `count` ranks printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [find_mpirun(), "--oversubscribe", "-np", str(count), sys.executable, "-c", BEFORE + script]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[int, list[str]] = {rank: [] for rank in range(count)}
    for line in done.stdout.splitlines():
        rank, _, text = line.partition(": ")
        said[int(rank)].append(text)
    return said


def test_typed_messages_name_their_rank() -> None:
    """Messages come typed from the rank that sent them."""
    said = world(
        3,
        """
if channel.rank:
    channel.say(0, OrderState(channel.rank, 0))
    [(rank, message)] = heard(1)
    tell(f"{rank} {message.number} {sum(map(len, message.words))}")
    part()
tell(sorted((rank, message.number) for rank, message in heard(2)))
for rank in channel.peers:
    channel.say(rank, Order(rank, ("x" * 500_000,) * rank))
part(Quit(0))
""",
    )
    assert said == {
        0: ["[(1, 1), (2, 2)]", "parted True"],
        1: ["0 1 500000", "parted True"],
        2: ["0 2 1000000", "parted True"],
    }


def test_what_was_said_is_said_again_in_time() -> None:
    """A message that does not change is a sign of life; a new one goes at once."""
    said = world(
        2,
        """
channels.BEAT, began, numbers = 0.5, time.monotonic(), []
if channel.rank:
    while not channel.receive():
        channel.say(0, OrderState(1))
        time.sleep(0.005)
    tell(time.monotonic() - began >= 2 * channels.BEAT)
    for _ in range(10):
        channel.say(0, OrderState(2))
        time.sleep(0.005)
    part()
tell([message.number for _, message in heard(3)])
channel.say(1, Order(1))
while not {2, 9} & set(numbers):
    numbers += [message.number for _, message in heard(1)]
tell(2 in numbers)
part(Quit(0))
""",
    )
    assert said == {0: ["[1, 1, 1]", "True", "parted True"], 1: ["True", "parted True"]}


def test_silence_is_noticed_and_ends_the_world() -> None:
    """No one waits at the end for a rank that is gone."""
    said = world(
        2,
        """
channels.DEAD = 1.0
if channel.rank:
    time.sleep(8)
    heard(1)
    MPI.Finalize()
    os._exit(0)
heard(0)
begun = time.monotonic()
tell(channel.silent())
tell(channel.close(Quit(0)))
tell(time.monotonic() - begun < 7)
tell(channel.silent())
MPI.Finalize()
os._exit(0)
""",
    )
    assert said[0] == ["[]", "False", "True", "[1]"]


def test_a_host_runs_what_it_is_ordered_last(tmp_path: Path) -> None:
    """What the order before has started has ended then; a file that a host does not see is named."""
    said = world(
        2,
        f"""
from pathlib import Path
from hpcrl.errors import UsageError
from hpcrl.launch.mpi.host_rank import HostRank
from hpcrl.launch.mpi.launcher_rank import MpiHosts
from hpcrl.launch.mpi.placement import Placement
folder = Path({str(tmp_path)!r})

def turn_until(done):
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        hosts._exchange()
        time.sleep(0.02)

if channel.rank:
    rank = HostRank(channel, "b")
    tell(f"quit {{rank.run()}}")
    part(rank.report)
hosts = MpiHosts(channel, Placement(("a", "b"), ()), {{}})
hosts.check_shared(folder)
try:
    hosts.check_shared(folder / "job.json")
except UsageError as error:
    tell(str(error).replace(str(folder), "RUN"))
words = ["hpcrl.run.process", "sh", "-c", "echo $$; exec sleep 100"]
first = hosts._start(1, words, folder / "log")
turn_until(lambda: (folder / "log").exists() and (folder / "log").read_text())
second = hosts._start(1, ["hpcrl.run.process", "sh", "-c", "exit 5"], folder / "log")
turn_until(lambda: second.status is not None)
tell(f"{{first.status}} {{second.status}}")
part(Quit(3))
""",
    )
    assert said[0] == [
        "host b does not see the run directory: no RUN/job.json; put --run-dir on a file system that all hosts share",
        "None 5",
        "parted True",
    ]
    assert said[1] == ["quit 3", "parted True"]
    assert not alive(int((tmp_path / "log").read_text()))


def test_malformed_message_names_its_rank() -> None:
    """A malformed message names the rank, and the next one is received."""
    said = world(
        2,
        """
if channel.rank:
    raw(0, b"not JSON")
    raw(0, pack(Quit(0)))  # which only the launcher says
    channel.say(0, OrderState(4, -9))
    part(OrderState(4, -9))
for one in heard(3):
    tell(one if isinstance(one, str) else one[1])
part(Quit(0))
""",
    )
    first, second, third, parted = said[0]
    assert first.startswith("MPI rank 1 sent no valid message") and second.startswith(
        "MPI rank 1 sent no valid message"
    )
    assert (third, parted) == ("OrderState(number=4, status=-9)", "parted True")


def test_oversized_message_is_refused() -> None:
    """A message beyond the limit is refused unread, and no one waits for it."""
    said = world(
        2,
        """
channels.MAX_MESSAGE = 1000
if channel.rank:
    request = channel.world.Isend([bytes(5_000_000), MPI.BYTE], dest=0)
    channel.world.Barrier()
else:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            channel.receive()
        except PeerError as error:
            tell(error)
            break
    tell(f"parted {channel.close(Quit(0))}")
    channel.world.Barrier()
# what nobody took is taken here, so that this world can end as it should
if channel.rank == 0:
    buffer = bytearray(5_000_000)
    channel.world.Recv([buffer, MPI.BYTE], source=1)
else:
    request.Wait()
MPI.Finalize()
os._exit(0)
""",
    )
    assert said[0] == [
        "MPI rank 1 sends a message of 5000000 bytes, 1000 are allowed; use one version of hpcrl on all hosts",
        "parted False",
    ]


def test_gather_is_typed() -> None:
    """Gathering is typed too, and every rank learns whose message was malformed."""
    said = world(
        3,
        """
everyone = channel.gather(Order(words=("x" * channel.rank,)))
tell([one.words for one in everyone])
try:
    channel.gather(Order() if channel.rank != 2 else OrderState())
except PeerError as error:
    tell(str(error).partition(":")[0])
part(OrderState() if channel.rank else Quit(0))
""",
    )
    wrong = {0: 2, 1: 2, 2: 0}  # rank 2 itself takes the others' for wrong
    for rank in range(3):
        assert said[rank] == [
            "[('',), ('x',), ('xx',)]",
            f"MPI rank {wrong[rank]} sent no valid message for this rank",
            "parted True",
        ]


# ---- the messages themselves


REPORT = HostReport("a", "a.b", (Network("ib0", "10.0.0.1", 24, 100000),), True, 1.5, 4, 2**40, 8)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (FromLauncher, Order(3, ("hpcrl.launch.host", "/run"), "/run/logs/host-a.log")),
        (FromLauncher, Quit(-9)),
        (OrderState, OrderState(3, -15)),
        (HostReport, REPORT),
    ],
)
def test_what_is_said_is_what_is_heard(kinds: object, said: Message) -> None:
    assert unpack(pack(said), kinds, 1) == said
    assert unpack(bytearray(pack(said)), kinds, 1) == said


@pytest.mark.parametrize("message", [Order(), Quit(0)])
def test_a_host_does_not_speak_as_the_launcher(message: Message) -> None:
    with pytest.raises(PeerError, match="^MPI rank 5.*message for this rank"):
        unpack(pack(message), OrderState, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff{}",
        b"[" * 100_000,
        *map(
            msgspec.json.encode,
            (
                {"op": "quit", "status": 0},
                {"is": "quit"},
                {"is": "quit", "status": "0"},
                {"is": "quit", "status": 0, "more": 1},
                {"is": "dance"},
                {"is": "order", "number": -1},
                {"is": "order", "words": [1]},
                [],
                None,
            ),
        ),
    ],
)
def test_what_is_no_message_names_the_rank(data: bytes) -> None:
    with pytest.raises(PeerError, match="^MPI rank 2 sent no valid message.*rank.*use.*hpcrl on all hosts"):
        unpack(data, FromLauncher, 2)


@given(st.binary(max_size=64), st.integers(0, 63))
def test_no_bytes_are_a_crash(noise: bytes, at: int) -> None:
    whole = pack(Order(1, ("hpcrl.launch.host", "/run")))
    for data in (noise, whole[: at % len(whole)] + noise, whole[: at % len(whole)]):
        for kinds in (FromLauncher, OrderState, HostReport):
            with contextlib.suppress(PeerError):
                unpack(data, kinds, 0)
