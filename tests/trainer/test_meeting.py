"""What it takes for many ranks to meet: requests of the store where they look one another up."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpcrl.errors import UsageError
from hpcrl.transport.torch_store import connect_store, open_store
from tests.support.runs import REPO

RANKS = 24
#: forks ranks, which make the trainer's groups and use them, and counts what they ask the store for
PROGRAM = """
import json, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from hpcrl.config.options import Options
from hpcrl.transport.torch_store import connect_store, open_store
from hpcrl.trainer.collectives import broadcast_json, connect_when_needed, make_patient

ranks, lazily = int(sys.argv[1]), sys.argv[2] == "lazily"

class Counted(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store, self.asked = store, 0

def counted(name):
    def ask(self, *given):
        self.asked += 1
        return getattr(self.store, name)(*given)
    return ask

for name in ("set", "get", "add", "wait", "check", "append", "multi_get", "multi_set", "compare_set", "delete_key"):
    setattr(Counted, name, counted(name))
Counted.has_extended_api = Counted.hasExtendedApi = lambda self: True

told, tell = os.pipe()
asked, count = os.pipe()
children = []
for rank in range(ranks):
    if not (child := os.fork()):
        torch.set_num_threads(1)
        store = Counted(connect_store("127.0.0.1", int(os.read(told, 8)), 120))
        if lazily:
            connect_when_needed()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        patient = make_patient(Options())
        assert broadcast_json({"all": "right"} if rank == 0 else None, group=patient) == {"all": "right"}
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        assert total == sum(range(ranks))
        dist.barrier()
        os.write(count, f"{store.asked:<8}".encode())
        os._exit(0)
    children.append(child)
server = open_store("127.0.0.1")
for _ in children:
    os.write(tell, f"{server.port:<8}".encode())
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
print(json.dumps(sum(int(os.read(asked, 8)) for _ in children)))
"""


def requests(way: str) -> int:
    """What one store of RANKS ranks is asked for in all."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_GLOO_LAZY_INIT"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(RANKS), way],
        env=env | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(json.loads(done.stdout))


@pytest.mark.process
def test_store_requests_grow_as_n_log_n() -> None:
    """Two groups, by default: 4 N^2 requests and some; connected when needed: N log N for each collective."""
    eager, lazy = requests("at once"), requests("lazily")
    assert eager > 2 * RANKS**2
    assert lazy < 10 * RANKS * math.log2(RANKS)


def listening(port: int) -> set[str]:
    """The addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_a_store_listens_on_one_address() -> None:
    server = open_store("127.0.0.2")
    assert (server.host, listening(server.port)) == ("127.0.0.2", {"127.0.0.2"})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), 1)
    connect_store("127.0.0.2", server.port, 5).set("a", b"\xff\x00")
    assert server.get("a") == b"\xff\x00"
    port = server.port
    del server
    assert listening(port) == set()


def test_a_store_binds_no_other_address(tmp_path: Path) -> None:
    for address, said in (("0.0.0.0", "every interface"), ("192.0.2.7", "cannot listen on 192.0.2.7")):
        with pytest.raises(UsageError, match=said):
            open_store(address)
