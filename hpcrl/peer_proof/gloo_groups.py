"""Every gloo group of this process is a proved one, be it made by hpcrl, Megatron, vLLM or torch itself.

    prove_groups(key)               # before the first group is made
    ...
    unproved_groups()               # of torch's own table: none

All of them are objects of one class, which torch and vLLM look up by name when they make a group; `prove_groups` puts
ours in its place.  What makes gloo groups without it, splitting one in C++, is refused.

Invariants: a group is returned after all its members have proved to one another that they hold the key, and before
anything else was sent on it; after that no further connection to its port is accepted; a group that is not proved is in
`unproved_groups`.
"""

from __future__ import annotations

import threading
import weakref
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcrl.errors import HpcrlError
from hpcrl.peer_proof import connections
from hpcrl.peer_proof.addresses import AddressStore, listener_of
from hpcrl.peer_proof.exchange import Exchange
from hpcrl.peer_proof.pairs import WHOLE, proved_peers

RawGloo = c10d.ProcessGroupGloo


class ProvedGloo(RawGloo):  # type: ignore[misc, valid-type]
    """A gloo group, made as torch's own, whose ranks have proved who they are.

    Args:
        key: of its members; by default that of `prove_groups`.
        name: for messages.

    Raises:
        PeerError, DeadlineError, DistBackendError: as `Exchange.run`.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *given: Any, key: bytes = b"", name: str = "", **named: Any
    ) -> None:
        key = key or _process.key
        name = name or f"gloo group {_making.name or '?'} of {size} ranks"
        self.addresses = AddressStore(store, rank)
        super().__init__(self.addresses, rank, size, *given, **named)
        if size > 1:
            connected = bool(self.addresses.peers)  # gloo connects to all at once, unless told to when needed
            peers = proved_peers(rank, size, connected)
            if not (connected or size <= WHOLE):
                _all_here(store, size)  # a member that some have as a peer and others have not may come late
            self.addresses.learn(peers)
            Exchange(self, self.addresses, key, peers, name).run()
            self.addresses.keep(peers)
        for end in self.addresses.mine.values():
            connections.close_port(listener_of(end.address).port)
        if _making.name:  # torch is making it, and keeps but its own part; any other caller holds what it has made
            _making.made.append(self)


class _Process:
    """What this process proves its groups with."""

    key = b""


class _Making(threading.local):
    """The group that this thread is making, and what was made of it."""

    def __init__(self) -> None:
        self.name = ""
        self.made: list[ProvedGloo] = []


_process = _Process()
_making = _Making()
#: what torch's groups hold of ours, for as long as they live: torch keeps its own part alone
_held: weakref.WeakKeyDictionary[Any, list[ProvedGloo]] = weakref.WeakKeyDictionary()


def prove_groups(key: bytes) -> None:
    """Make every gloo group from now on a proved one; a second call changes the key.

    Raises:
        HpcrlError: if there are gloo groups already.
    """
    _process.key = key
    check_groups()
    if c10d.ProcessGroupGloo is ProvedGloo:
        return
    for module in (c10d, dist, torch._C._distributed_c10d):
        module.ProcessGroupGloo = ProvedGloo
    c10d._new_process_group_helper = _named(c10d._new_process_group_helper)
    c10d.split_group = dist.split_group = _not_split(c10d.split_group)


def unproved_groups() -> list[str]:
    """The names of the gloo groups in torch's table that are not proved."""
    found = []
    for group, name in c10d._world.pg_names.items():
        for device in group._device_types:
            backend = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if backend.name() == "gloo" and not isinstance(backend, ProvedGloo):
                found.append(str(name))
    return found


def check_groups() -> None:
    """Raise HpcrlError if there is a gloo group whose members have not proved who they are."""
    if found := unproved_groups():
        raise HpcrlError(f"the gloo group {found[0]} was made past hpcrl: its ranks have not proved who they are")


def protection(device: str) -> str:
    """What keeps other processes out of this run's groups, in a line for its user."""
    gloo = "gloo groups: every pair has proved to hold the run's key" if _process.key else "gloo groups: unproved"
    return gloo if device == "cpu" else f"{gloo}; NCCL proves its first connections alone (docs/security.md)"


def _named(make: Any) -> Any:
    """torch's function that makes each group, so that ours knows the group's name and lives as long."""

    @wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        _making.name = str(named["group_name"] if "group_name" in named else given[5])
        _making.made = []
        try:
            found = make(*given, **named)
            if _making.made:
                _held[found[0]] = _making.made
            return found
        finally:
            _making.name = ""
            _making.made = []

    return made


def _not_split(split: Any) -> Any:
    """torch's function that splits a group, where no gloo is part of it: that gloo would be made in C++, unproved."""

    @wraps(split)
    def refuse(*given: Any, **named: Any) -> Any:
        parent = (given[0] if given else named.get("parent_pg")) or c10d._get_default_group()
        backends = str(named.get("backend") or given[5:6] or c10d._world.pg_map[parent][0])
        if "gloo" in backends:
            raise HpcrlError(
                "a group that has gloo cannot be split: the ranks of the new one could not prove who they are",
                "unset VLLM_DISTRIBUTED_USE_SPLIT_GROUP, or make it with torch.distributed.new_group",
            )
        return split(*given, **named)

    return refuse


def _all_here(store: Any, size: int) -> None:
    """Wait until every rank is making this group: from then on peers have a deadline of their own."""
    number = store.add("proof/here", 1) - 1
    everyone = f"proof/all/{number // size}"  # a store may see the same group several times
    if number % size == size - 1:
        store.set(everyone, b"1")
    store.get(everyone)
