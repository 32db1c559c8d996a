"""The arguments of every part of an engine over several hosts, as vLLM's own parser takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.engine.multi_node import bound_socket, variables
from hpcrl.engine.server_settings import Build, flags
from hpcrl.plan import Host, make_plan
from hpcrl.run.peers import MeetingPeer
from tests.support.second_user import SecondUser
from tests.support.tiny import make_model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("parts", [1, 4, 32])
def test_vllm_takes_the_arguments_of_every_part(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of 32 GPUs over four hosts, as far as a machine without them can go: vLLM's own parser and its
    checks."""
    from hpcrl.engine.server import parse

    options = Options(
        hf_checkpoint=str(make_model(tmp_path / "model")),
        actor_num_gpus_per_node=8,
        rollout_num_gpus=32,
        rollout_num_gpus_per_engine=32,
        vllm={"enable_expert_parallel": True} | ({"data_parallel_size": parts} if parts > 1 else {}),
    )
    hosts = [Host(name, 8, f"10.0.0.{i}", "ib0") for i, name in enumerate("tabcd")]
    plan = make_plan(options, hosts, "test")
    for node in range(4):
        for name, value in variables(MeetingPeer(host="10.0.0.1", port=4001, rpc_port=4002), node).items():
            monkeypatch.setenv(name, value)
        found = parse(flags(options, plan, 0, 1, Build("0.32.0", cpu=False)))
        assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (4, node, "10.0.0.1", 4001)
        assert (found.headless, found.tensor_parallel_size * found.data_parallel_size) == (node > 0, 32)
        assert found.data_parallel_size == parts and found.enable_expert_parallel


TAKE = """
import socket, sys
with socket.socket() as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", int(sys.argv[1])))
        sock.listen()
        print("taken")
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_bound_port_is_no_other_users(second_user: SecondUser, named: bool) -> None:
    """Before the server listens there are minutes in which another user could bind the port too, and be sent the key."""
    with bound_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    with bound_socket("127.0.0.1", port if named else 0) as sock:
        assert second_user.run(TAKE, str(sock.getsockname()[1])) == "Address already in use\n"
