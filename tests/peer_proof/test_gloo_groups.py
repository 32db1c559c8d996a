"""Groups of real ranks: all that are made are proved, and what another user makes of their ports."""

from __future__ import annotations

import gc
import os
import re
import socket
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcrl.errors import HpcrlError
from hpcrl.peer_proof import connections, exchange, gloo_groups
from hpcrl.peer_proof.addresses import listener_of
from hpcrl.trainer.collectives import connect_when_needed
from tests.support.children import read_line
from tests.support.gloo_attack import GlooAttack
from tests.support.ranks import RankError, run_ranks
from tests.support.second_user import SecondUser

KEY = b"k" * 32
pytestmark = pytest.mark.process


def begin(key: bytes = KEY, lazy: bool = True, seconds: float = 30) -> tuple[int, int]:
    if lazy:
        connect_when_needed()
    if key:
        gloo_groups.prove_groups(key)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


# ---- what is made


def make_all_kinds(lazy: bool) -> dict[str, Any]:
    rank, size = begin(lazy=lazy)
    groups = [None, dist.new_group(backend="gloo"), dist.new_group([0, 2]), dist.new_group([rank])]
    groups.append(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="gloo")[0])
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups += [mesh["a"].get_group(), mesh["b"].get_group()]
    sums = []
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            sums.append(int(one) == dist.get_world_size(group))
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    found = gloo_groups.unproved_groups()
    count = len(c10d._world.pg_map)
    open_ports = _open_ports()
    raw = gloo_groups.RawGloo(dist.PrefixStore("raw", c10d._get_default_store()), rank, size)
    hidden = dist.ProcessGroup(dist.HashStore(), rank, size)
    hidden._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, raw)
    c10d._world.pg_names[hidden] = "past us"
    seen = gloo_groups.unproved_groups()
    del c10d._world.pg_names[hidden]
    return {
        "sums": all(sums),
        "swapped": swapped.tolist(),
        "unproved": found,
        "count": count,
        "open": open_ports,
        "seen": seen,
    }


def _open_ports() -> list[int]:
    """The ports of gloo at which this process still accepts a connection."""
    found = []
    for made in gloo_groups._held.values():
        for group in made:
            for end in group.addresses.mine.values():
                port = listener_of(end.address).port
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
                    found.append(port)
    return found


@pytest.mark.parametrize("lazy", [True, False])
def test_every_group_that_torch_makes_is_proved(lazy: bool) -> None:
    """Default, new, of subsets, by enumeration and of a mesh; nothing connects to their ports any more; one that was
    made past us is seen."""
    for found in run_ranks(4, make_all_kinds, lazy):
        assert found["sums"]
        assert found["swapped"] == [0, 1, 2, 3]
        assert found["unproved"] == []
        assert found["count"] >= 5
        assert found["open"] == []
        assert found["seen"] == ["past us"]


def debug_groups() -> list[str]:
    begin()
    dist.all_reduce(torch.ones(1))
    return gloo_groups.unproved_groups()


def test_groups_in_torch_s_debug_mode_are_proved() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around each group, with a gloo group of its own."""
    assert run_ranks(2, in_debug_mode) == [[], []]


def in_debug_mode() -> list[str]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    return debug_groups()


def large_group() -> tuple[bool, str]:
    from hpcrl.peer_proof import addresses, pairs

    addresses.WHOLE = pairs.WHOLE = gloo_groups.WHOLE = 2  # as if six ranks were many
    rank, size = begin()
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.barrier()
    dist.broadcast(one, 3)
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(one, gathered, dst=0)
    try:
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
    except (HpcrlError, RuntimeError) as error:
        return int(one) == size, str(error)
    return int(one) == size, ""


def test_a_pair_that_is_not_proved_is_not_made() -> None:
    """In a large group: its collectives work, and one that needs every pair is an error in words."""
    found = run_ranks(6, large_group)
    assert all(right for right, _ in found)
    assert any("have not proved" in error for _, error in found)


def split() -> str:
    begin()
    with pytest.raises(HpcrlError) as caught:
        dist.split_group(split_ranks=[[0, 1]])
    return str(caught.value)


def test_gloo_groups_cannot_be_split() -> None:
    """That would make one in C++, past the proof."""
    assert "VLLM_DISTRIBUTED_USE_SPLIT_GROUP" in run_ranks(2, split)[0]


# ---- liars


def with_another_key(lazy: bool) -> str:
    rank = int(os.environ["RANK"])
    try:
        begin(KEY if rank == 0 else b"x" * 32, lazy)
    except HpcrlError as error:
        return f"{type(error).__name__}: {error}"
    return "proved"


@pytest.mark.parametrize("lazy", [True, False])
def test_another_key_is_named(lazy: bool) -> None:
    """By rank, host and group."""
    for rank, said in enumerate(run_ranks(2, with_another_key, lazy)):
        assert said.startswith("PeerError")
        assert f"rank {1 - rank} on {socket.gethostname()}" in said
        assert "2 ranks" in said


def silent() -> str:
    rank = int(os.environ["RANK"])
    exchange.LIMIT = 1.0
    exchange.Exchange.run.__defaults__ = (1.0,)
    if rank == 1:
        exchange.Exchange._prove = lambda *_: time.sleep(4)
    try:
        begin()
    except HpcrlError as error:
        return f"{type(error).__name__}: {error}"
    return "proved"


def test_a_silent_rank_has_a_deadline_of_its_own() -> None:
    """Far within the group's."""
    said = run_ranks(2, silent)[0]
    assert said.startswith("DeadlineError")
    assert "1 s" in said


# ---- another user


def exchange_weights(key: bytes, address: str) -> tuple[str, float]:
    """A rank that comes late, as ranks do, and a tensor of secrets that they add up."""
    exchange.LOOK = 0.3
    rank = int(os.environ["RANK"])
    if rank == 1:
        time.sleep(0.3)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    options = gloo_groups.RawGloo._Options()
    options._devices = [gloo_groups.RawGloo.create_device(hostname=address, lazy_init=True)]
    options._timeout = timedelta(seconds=5)
    try:
        more = {"key": key} if key else {}
        group = (gloo_groups.ProvedGloo if key else gloo_groups.RawGloo)(store, rank, 2, options, **more)
        secret = torch.full((1000,), 3.0)
        group.allreduce([secret]).wait()
    except (HpcrlError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", 0.0
    return "", float(secret.sum())


def race(user: SecondUser, key: bytes, manner: str) -> tuple[list[tuple[str, float]] | str, dict[str, Any]]:
    address = f"127.77.{os.getpid() % 250}.{os.getpid() // 250 % 250 + 1}"  # no other test's ranks are there
    attack = GlooAttack(user, os.getuid(), manner, within=address)
    try:
        found: Any = run_ranks(2, exchange_weights, key, address, timeout=40)
    except RankError as error:
        found = str(error)
    return found, attack.end()


@pytest.mark.parametrize("manner", ["answer", "silent"])
def test_another_user_gets_no_place_in_a_group(second_user: SecondUser, manner: str) -> None:
    """Who connects to gloo's ports before the ranks do is sent a proof and nothing else, and ends the run in words that
    name the user; otherwise the ranks add up what they hold.  On a busy machine it may come too late a few times."""
    named = 0
    for number in range(12):
        if number >= 3 and named:
            break
        found, reached = race(second_user, KEY, manner)
        assert reached["made"] > 0
        assert reached["bytes"] <= 4 * 32, "no more than a proof for each connection"
        if isinstance(found, str):
            pytest.fail(found)
        for said, total in found:
            assert total in (0.0, 6000.0)
            assert said or total == 6000.0
            named += bool(re.search(rf"PeerError.* user {second_user.uid}\b", said))
    assert named > 0


def test_the_race_is_one_that_is_won_unproved(second_user: SecondUser) -> None:
    """The same without the proof: the attack is the one that took places, and received what ranks hold."""
    assert any(race(second_user, b"", "answer")[1]["bytes"] >= 1000 for _ in range(30))


def test_a_group_that_its_maker_drops_is_gone() -> None:
    """One that torch makes lives as long as torch's own; one that is made directly, as for weights, as its maker holds
    it: the peers of a group that stays wait for gloo's timeout."""
    group = gloo_groups.ProvedGloo(dist.HashStore(), 0, 1, timedelta(seconds=5), key=KEY)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None


BYSTANDER = """
import socket, sys
own = socket.create_server(("127.0.0.2", int(sys.argv[1])))
both = [socket.create_connection(own.getsockname()), own.accept()[0]]
print("connected", flush=True)
sys.stdin.readline()
both.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print("connected", flush=True)
sys.stdin.readline()
"""


def test_a_bystander_is_no_stranger(second_user: SecondUser) -> None:
    """Another user's connection to the same port of another address has nothing to do with this rank."""
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        other = second_user.start(BYSTANDER, str(port))
        assert read_line(other) == "connected\n"
        assert connections.strangers(port) == {}
        other.stdin.write("\n")
        other.stdin.flush()
        assert read_line(other) == "connected\n"
        with mine.accept()[0]:
            assert list(connections.strangers(port).values()) == [second_user.uid]
