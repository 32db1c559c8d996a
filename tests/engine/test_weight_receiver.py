"""The worker extension does its part when vLLM makes a worker, and nothing when it is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

#: as vLLM's WorkerWrapperBase.init_worker does it: the extension becomes the last base of a class that is there already
SCRIPT = """
import json, os
os.environ["HPCRL_HTTP_KEY_FILE"] = "/nowhere"  # as in an engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
from hpcrl.engine.weight_receiver import WorkerExtension

def seen():
    return sorted(n for n in Factory._registry if n.startswith("hpcrl")), os.environ.get("HPCRL_PARENT") == str(os.getpid())

class Base:
    def __init__(self, rank):
        self.rank = rank

class Worker(Base):
    pass

imported = seen()
Worker(0)
Worker.__bases__ = (*Worker.__bases__, WorkerExtension)
joined = seen()
worker = Worker(rank=3)
Worker(rank=4)  # a second one in the same process finds everything done
print(json.dumps([imported, joined, seen(), worker.rank]))
"""


def test_nothing_happens_before_a_worker_is_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported, joined, made, rank = json.loads(done.stdout.splitlines()[-1])
    assert imported == joined == [[], False]
    assert made == [["hpcrl_disk", "hpcrl_gloo", "hpcrl_ipc", "hpcrl_nccl", "hpcrl_shm"], True]
    assert rank == 3
