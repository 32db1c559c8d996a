"""What roles publish: typed, found by the others of the same attempt alone, and waited for with a deadline."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.run.peers import (
    EnginePeer,
    Peer,
    PublishedRecords,
    RolloutPeer,
    StorePeer,
    TrainerPeer,
    find,
    peer_file,
    publish,
    role_of,
    wait_for,
)
from hpcrl.run.rundir import RunDir
from hpcrl.utils.waiting import Deadline
from tests.support.cpu_seconds import slowdown

ENGINE = EnginePeer(host="127.0.0.1", port=7, model_len=64)
ALL: list[Peer] = [
    TrainerPeer(start=3, total=10),
    StorePeer(host="10.0.0.1", port=65535),
    RolloutPeer(host="::1", port=1, public_key="k", run_id="run", attempt=2),
    ENGINE,
]


def test_a_peer_is_found_once_it_has_published(rundir: RunDir) -> None:
    threading.Timer(0.1, lambda: publish(rundir, ENGINE, 3)).start()
    assert wait_for(rundir, EnginePeer, 3, 5) == msgspec.structs.replace(ENGINE, pid=os.getpid())
    assert find(rundir, EnginePeer, 2) is None


@pytest.mark.parametrize("peer", ALL, ids=lambda peer: role_of(type(peer)))
def test_every_role_has_a_record_of_its_own(rundir: RunDir, peer: Peer) -> None:
    publish(rundir, peer)
    assert find(rundir, type(peer)) == msgspec.structs.replace(peer, pid=os.getpid())
    for other in ALL:
        if other is not peer:
            assert find(rundir, type(other)) is None
            peer_file(rundir.here, type(other), 0).write_bytes(peer_file(rundir.here, type(peer), 0).read_bytes())
            with pytest.raises(PeerError, match=rf"{role_of(type(other))}-0\.json is damaged"):
                find(rundir, type(other))


def test_an_earlier_attempts_peer_does_not_count(rundir: RunDir) -> None:
    publish(rundir, ENGINE)
    second = RunDir(rundir.root, 1)
    second.make_attempt()
    assert find(second, EnginePeer) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff{}",
        b"[]",
        b"{}",
        b'{"role": "engine", "host": "a"}',
        b'{"role": "engine", "host": "", "port": 7}',
        b'{"role": "engine", "host": "a", "port": 0}',
        b'{"role": "engine", "host": "a", "port": 65536}',
        b'{"role": "engine", "host": "a", "port": "7"}',
        b'{"role": "engine", "host": "a", "port": 7, "uds": "/tmp/x"}',
        b'{"role": "motor", "host": "a", "port": 7}',
    ],
)
def test_a_damaged_record_is_named_at_once(rundir: RunDir, damage: bytes) -> None:
    peer_file(rundir.here, EnginePeer, 0).write_bytes(damage)
    with pytest.raises(PeerError, match=r"engine-0\.json.*another version of hpcrl"):
        wait_for(rundir, EnginePeer, 0, 30)


def test_wait_ends_at_its_deadline(rundir: RunDir) -> None:
    """A wait ends at its deadline and names role and log."""
    with pytest.raises(DeadlineError, match=r"engine-3.*not come up within 0 s.*engine-3\.log"):
        wait_for(rundir, EnginePeer, 3, 0.1)


def test_wait_ends_with_the_attempt(rundir: RunDir) -> None:
    """A wait ends at once when the attempt has failed."""
    rundir.fail("trainer", 2, "out of memory")
    begun = time.monotonic()
    with pytest.raises(PeerError, match="trainer-2: out of memory"):
        wait_for(rundir, EnginePeer, 0, 30)
    assert time.monotonic() - begun < 5 * slowdown()


# ---- many records in one directory


def leave(directory: Path, name: str, port: int = 1) -> None:
    (directory / f"{name}.json").write_bytes(msgspec.json.encode(EnginePort(port)))


class EnginePort(msgspec.Struct):
    port: int


def test_a_record_is_read_once(tmp_path: Path) -> None:
    published = PublishedRecords(tmp_path, EnginePort)
    leave(tmp_path, "n1")
    (tmp_path / "n2.json").write_text("{")
    (tmp_path / "other.txt").write_text("")
    assert [*published.poll()] == ["n1"] and [*published.damaged] == ["n2"]
    (tmp_path / "n1.json").unlink()
    leave(tmp_path, "n2")
    leave(tmp_path, "n3")
    assert [*published.poll()] == ["n1", "n3"] and [*published.damaged] == ["n2"]


@pytest.mark.parametrize("wanted", [2, ["n1", "n2"]])
def test_records_are_waited_for(tmp_path: Path, wanted: int | list[str]) -> None:
    looks: list[int] = []

    def arrive() -> None:
        looks.append(len(looks))
        leave(tmp_path, f"n{len(looks)}")

    found = PublishedRecords(tmp_path, EnginePort).wait(wanted, Deadline(60.0), 0.01, arrive)
    assert sorted(found) == ["n1", "n2"] and len(looks) == 2


def test_a_wait_for_records_ends_in_time_or_when_told(tmp_path: Path) -> None:
    leave(tmp_path, "n1")
    leave(tmp_path, "n3")
    assert sorted(PublishedRecords(tmp_path, EnginePort).wait(["n1", "n2"], Deadline(0.0), 0.01)) == ["n1", "n3"]
    assert sorted(PublishedRecords(tmp_path, EnginePort).wait(9, Deadline(60.0), 0.01, lambda: True)) == ["n1", "n3"]
    (tmp_path / "n2.json").write_text("{")
    assert sorted(PublishedRecords(tmp_path, EnginePort).wait(["n1", "n2"], Deadline(60.0), 0.01)) == ["n1", "n3"]


def test_a_larger_record_is_damaged(tmp_path: Path) -> None:
    leave(tmp_path, "n1")
    published = PublishedRecords(tmp_path, EnginePort, most=5)
    assert not published.poll() and "n1" in published.damaged
