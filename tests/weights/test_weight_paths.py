"""Shared memory and the gloo group between trainer and engines, without engines."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

from hpcrl.errors import DeadlineError
from hpcrl.queue.auth import ClientKeys, ServerKeys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.weights import gloo_group
from hpcrl.weights.shared_memory import Region, open_region

HERE = "127.0.0.1"


def test_what_one_side_writes_the_other_reads() -> None:
    region = Region(4096)
    seen = open_region(region.to_wire())
    region.buffer[7] = 99
    assert seen.numel() == 4096 and int(seen[7]) == 99
    region.close()
    region.buffer[7] = 98
    assert int(seen[7]) == 98, "a mapping outlives the descriptor"


def test_region_takes_memory_when_written() -> None:
    """A region takes memory only where it is written."""
    region = Region(1 << 36)
    region.buffer[1 << 35] = 1
    assert os.stat(f"/proc/self/fd/{region.fd}").st_blocks * 512 < 1 << 22
    region.close()


def test_a_region_cannot_be_cut_under_its_readers() -> None:
    region = Region(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 10)
    region.close()


def test_nothing_else_is_opened() -> None:
    region, other = Region(4096), Region(4096)
    good = region.to_wire()
    unsealed = os.memfd_create("hpcrl-weights")
    os.ftruncate(unsealed, 4096)
    for change in (
        {"inode": good["inode"] + 1},
        {"size": 64},
        {"fd": other.fd},
        {"fd": 0},
        {"fd": unsealed, "inode": os.fstat(unsealed).st_ino},
        {"fd": "3/../../self/fd/3"},
        {"pid": -1},
        {"pid": True},
        {"more": 1},
    ):
        with pytest.raises(ValueError, match=r"region"):
            open_region(good | change)
    with pytest.raises(OSError, match="No such file"):
        open_region(good | {"pid": 2**22})
    os.close(unsealed)
    region.close()
    with pytest.raises((OSError, ValueError)):
        open_region(good)
    other.close()


def groups(count: int, seconds: float = 20) -> list[gloo_group.GlooGroup]:
    own, mine = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    server = StoreServer(HERE, ServerKeys(*own, (mine[0],)))
    keys = ClientKeys(*mine, own[0])
    with ThreadPoolExecutor(count) as pool:
        joined = [pool.submit(gloo_group.join, HERE, server.port, keys, i, count, HERE, seconds) for i in range(count)]
        found = [future.result(30) for future in joined]
    server.close()
    return found


def test_a_broadcast_reaches_all() -> None:
    members = groups(3)
    tensors = [torch.arange(100_000, dtype=torch.int64).view(torch.uint8) * (i == 0) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda pair: gloo_group.broadcast(*pair, 20), zip(members, tensors, strict=True)))
    assert all(torch.equal(tensors[0], tensor) for tensor in tensors[1:])


def test_unanswered_broadcast_ends() -> None:
    """A broadcast that no one receives ends, and may be watched."""
    big = torch.zeros(1 << 26, dtype=torch.uint8)
    sender, _ = groups(2, seconds=1)
    looks = threading.Semaphore(0)
    with pytest.raises(DeadlineError, match="did not end within 0 s"):
        gloo_group.broadcast(sender, big, 0.1, looks.release)
    assert looks.acquire(timeout=0)


def test_a_broadcast_ends_when_the_watch_says_so() -> None:
    sender, _ = groups(2, seconds=1)

    def refuse() -> None:
        raise KeyError("an engine refused")

    with pytest.raises(KeyError, match="refused"):
        gloo_group.broadcast(sender, torch.zeros(1 << 26, dtype=torch.uint8), 20, refuse)
