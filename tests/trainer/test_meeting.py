"""What it takes for many ranks to meet: requests of the store where they look one another up."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from tests.support.runs import REPO

pytestmark = pytest.mark.process

RANKS = 24
#: forks ranks, which make the trainer's groups and use them, and counts what the store is asked for
PROGRAM = """
import collections, json, os, sys
from datetime import timedelta
import torch, torch.distributed as dist, zmq
from hpcrl.config.options import Options
from hpcrl.queue.auth import ClientKeys, ServerKeys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.rendezvous.store import KeyedStore
from hpcrl.rendezvous.table import to_ask
from hpcrl.trainer.collectives import broadcast_json, connect_when_needed, make_patient

ranks, lazily = int(sys.argv[1]), sys.argv[2] == "lazily"
own, mine = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
keys = ClientKeys(*mine, own[0])
told, tell = os.pipe()
children = []
for rank in range(ranks):
    if not (child := os.fork()):
        torch.set_num_threads(1)
        store = KeyedStore("127.0.0.1", int(os.read(told, 8)), keys, timedelta(seconds=120))
        if lazily:
            connect_when_needed()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        patient = make_patient(Options())
        assert broadcast_json({"all": "right"} if rank == 0 else None, group=patient) == {"all": "right"}
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        assert total == sum(range(ranks))
        dist.barrier()
        os._exit(0)
    children.append(child)
server = StoreServer("127.0.0.1", ServerKeys(*own, (mine[0],)))
asked = collections.Counter()
hear = server._hear
def counted(member, frame):
    asked[to_ask.decode(frame).verb] += 1
    hear(member, frame)
server._hear = counted
for _ in children:
    os.write(tell, f"{server.port:<8}".encode())
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
print(json.dumps(asked))
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
    return sum(json.loads(done.stdout).values())


def test_store_requests_grow_as_n_log_n() -> None:
    """Two groups, by default: 4 N^2 requests and some; connected when needed: N log N for each collective."""
    eager, lazy = requests("at once"), requests("lazily")
    assert eager > 4 * RANKS**2
    assert lazy < 10 * RANKS * math.log2(RANKS)
