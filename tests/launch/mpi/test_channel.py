"""The channel between ranks of a real MPI world, on this machine: what is not a message ends nothing but names its
sender."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.able import find_mpirun, needs

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
from hpcrl.launch.mpi.channel import TAG, Channel
from hpcrl.launch.mpi.channel import *

channel = Channel(MPI)

def raw(to, data):
    channel.world.Send([data, MPI.BYTE], dest=to, tag=TAG)

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

def part():
    tell(f"parted {channel.close(10)}")
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
    channel.send(0, ProgramEnded(channel.rank, 0))
    [(rank, message)] = heard(1)
    tell(f"{rank} {message.number} {sum(map(len, message.words))}")
else:
    tell(sorted((rank, message.number) for rank, message in heard(2)))
    for rank in (1, 2):
        channel.send(rank, StartProgram(rank, ("x" * 500_000,) * rank, ""))
part()
""",
    )
    assert said == {
        0: ["[(1, 1), (2, 2)]", "parted True"],
        1: ["0 1 500000", "parted True"],
        2: ["0 2 1000000", "parted True"],
    }


def test_malformed_message_names_its_rank() -> None:
    """A malformed message names the rank, and the next one is received."""
    said = world(
        2,
        """
if channel.rank:
    raw(0, b"not msgpack")
    raw(0, msgspec.msgpack.encode({"is": "quit", "status": 0}))  # which only the launcher says
    channel.send(0, PathFound("/x", True))
else:
    for one in heard(3):
        tell(one if isinstance(one, str) else one[1])
part()
""",
    )
    first, second, third, parted = said[0]
    assert first.startswith("MPI rank 1 sent no valid message") and second.startswith(
        "MPI rank 1 sent no valid message"
    )
    assert (third, parted) == ("PathFound(path='/x', found=True)", "parted True")


def test_oversized_message_is_refused() -> None:
    """A message beyond the limit is refused unread, and no one waits for it."""
    said = world(
        2,
        """
channels.MAX_MESSAGE = 1000
if channel.rank:
    request = channel.world.Isend([bytes(5_000_000), MPI.BYTE], dest=0, tag=TAG)
    channel.world.Barrier()
    tell("sent")
else:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            channel.receive()
        except PeerError as error:
            tell(error)
            break
    tell(f"parted {channel.close(10)}")
    channel.world.Barrier()
sys.stdout.flush()
os.environ["OMPI_MCA_mpi_abort_print_stack"] = "0"
# what nobody took is taken here, so that this world can end as it should
if channel.rank == 0:
    buffer = bytearray(5_000_000)
    channel.world.Recv([buffer, MPI.BYTE], source=1, tag=TAG)
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
everyone = channel.gather(FindPath(f"/rank{channel.rank}"))
tell([one.path for one in everyone])
try:
    channel.gather(FindPath("/x") if channel.rank != 2 else Beat())
except PeerError as error:
    tell(str(error).partition(":")[0])
part()
""",
    )
    wrong = {0: 2, 1: 2, 2: 0}  # rank 2 itself takes the others' for wrong
    for rank in range(3):
        assert said[rank] == [
            "['/rank0', '/rank1', '/rank2']",
            f"MPI rank {wrong[rank]} sent no valid message for this rank",
            "parted True",
        ]
