"""What ranks say over MPI: typed both ways, and whatever else comes is an error that names the rank that sent it."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import PeerError
from hpcrl.launch.mpi.channel import (
    MAX_MESSAGE,
    Beat,
    Bye,
    FindPath,
    FromHost,
    FromLauncher,
    Message,
    PathFound,
    ProgramEnded,
    Quit,
    RankJoined,
    StartProgram,
    check_size,
    pack,
    unpack,
)
from hpcrl.launch.probe import HostReport, Network

REPORT = HostReport("a", "a.b", (Network("ib0", "10.0.0.1", 24, 100000),), True, 1.5, 4, 2**40)
LAUNCHER: list[Message] = [
    Beat(),
    FindPath("/run/plan.json"),
    StartProgram(3, ("hpcrl.launch.host", "/run"), "/run/logs/host-a.log"),
    Quit(-9),
]
HOST: list[Message] = [
    Beat(),
    PathFound("/run/plan.json", False),
    ProgramEnded(3, -15),
    Bye(),
]


@pytest.mark.parametrize(
    ("kinds", "said"), [(FromLauncher, LAUNCHER), (FromHost, HOST), (RankJoined, [RankJoined(REPORT, 8)])]
)
def test_what_is_said_is_what_is_heard(kinds: object, said: list[Message]) -> None:
    for message in said:
        assert unpack(pack(message), kinds, 1) == message
        assert unpack(bytearray(pack(message)), kinds, 1) == message


@pytest.mark.parametrize("message", [FindPath("/x"), StartProgram(0, (), ""), Quit(0)])
def test_a_host_does_not_speak_as_the_launcher(message: Message) -> None:
    with pytest.raises(PeerError, match="^MPI rank 5.*message for this rank"):
        unpack(pack(message), FromHost, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b'{"op": "quit"}',
        *map(
            msgspec.msgpack.encode,
            (
                {"op": "quit", "status": 0},
                {"is": "quit"},
                {"is": "quit", "status": "0"},
                {"is": "quit", "status": 0, "more": 1},
                {"is": "dance"},
                {"is": "start", "number": -1, "words": [], "log": ""},
                {"is": "start", "number": 0, "words": [1], "log": ""},
                {"is": "find path", "path": 1},
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
    whole = pack(StartProgram(1, ("hpcrl.launch.host", "/run"), ""))
    for data in (noise, whole[: at % len(whole)] + noise, whole[: at % len(whole)]):
        for kinds in (FromLauncher, FromHost, RankJoined):
            with contextlib.suppress(PeerError):
                unpack(data, kinds, 0)


def test_a_message_has_a_greatest_size() -> None:
    check_size(MAX_MESSAGE, 1)
    with pytest.raises(
        PeerError, match=f"MPI rank 4 sends a message of {MAX_MESSAGE + 1} bytes, {MAX_MESSAGE} are allowed"
    ):
        check_size(MAX_MESSAGE + 1, 4)
