"""Sockets and addresses of an engine: what each of its parts gets where it spans several hosts, and the socket that
its server gets from the supervisor.

The first part chooses two free ports of its host and publishes them (`MeetingPeer`); vLLM binds them itself.  The
server's socket is bound before the server starts, so that its port is known and belongs to no other process.

Invariant: pure, except that it chooses and reads ports; imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.plan import Plan
from hpcrl.run.peers import MeetingPeer, publish
from hpcrl.run.role import RoleContext

NODE, MEETING = (
    "HPCRL_ENGINE_NODE",
    "HPCRL_ENGINE_MEETING",
)  #: of the server's environment: which part it is; the two ports


def meet(context: RoleContext) -> MeetingPeer:
    """Choose the address at which the parts of this engine meet, and publish it."""
    host = context.plan.engines[context.index].at
    sockets = [bound_socket(host, 0) for _ in range(2)]
    port, rpc_port = (found.getsockname()[1] for found in sockets)
    for found in sockets:
        found.close()  # vLLM binds them itself
    peer = MeetingPeer(host=host, port=port, rpc_port=rpc_port)
    publish(context.rundir, peer, context.index)
    return peer


def variables(peer: MeetingPeer, node: int) -> dict[str, str]:
    """The environment variables by which the server learns of it."""
    return {NODE: str(node), MEETING: f"{peer.port},{peer.rpc_port}"}


def node_of(environment: Mapping[str, str] = os.environ) -> int:
    """Which part of its engine a server is."""
    return int(environment.get(NODE, "0"))


def node_flags(options: Options, plan: Plan, index: int, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """vLLM's arguments for this part of an engine; none for one that lies in one host.  HpcrlError without a
    meeting."""
    places = plan.engine_nodes(index)
    if len(places) == 1:
        return {}
    try:
        port, rpc_port = map(int, environment[MEETING].split(","))
    except (KeyError, ValueError):
        raise HpcrlError(
            f"engine {index} spans {len(places)} hosts, and {MEETING} is not set to their meeting address"
        ) from None
    first = places[0].at
    node = node_of(environment)
    found: dict[str, Any] = {"nnodes": len(places), "node_rank": node, "master_addr": first, "master_port": port}
    if options.engine_data_parallel_size > 1:
        found |= {"data_parallel_address": first, "data_parallel_rpc_port": rpc_port}
    return found | ({"headless": True} if node else {})


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound for this user alone; port 0: any free one.

    SO_REUSEADDR would let every other user bind the same port as long as nothing listens at it, which is until the
    model is loaded.  Only a port that was named needs it, where connections of the one before are still waited for; it
    listens at once.

    Raises:
        OSError: where that cannot be.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        if port:
            sock.listen()
    except OSError:
        sock.close()
        raise
    return sock
