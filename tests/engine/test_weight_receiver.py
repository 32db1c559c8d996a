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
import json, os, sys
os.environ["HPCRL_HTTP_KEY_FILE"] = sys.argv[1]  # as in an engine
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


def test_nothing_happens_before_a_worker_is_made(tmp_path: Path) -> None:
    key = tmp_path / "http.key"
    key.write_text("5" * 64)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(key)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported, joined, made, rank = json.loads(done.stdout.splitlines()[-1])
    assert imported == joined == [[], False]
    assert made == [
        ["hpcrl_disk", "hpcrl_gloo", "hpcrl_ipc", "hpcrl_nccl", "hpcrl_shm", "hpcrl_vllm", "hpcrl_vllm_ipc"],
        True,
    ]
    assert rank == 3


#: vLLM asserts on its configuration where kernels are made again; its collective_rpc does not set it
CONFIGURED = """
from concurrent.futures import Future
from types import SimpleNamespace
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from hpcrl.engine.weight_receiver import WorkerExtension

config, seen = VllmConfig(), []

class Engine:
    mixed = unfinished = False
    parallel_config = SimpleNamespace(data_parallel_index=0)

    def take_pieces(self, reader):
        seen.append(get_current_vllm_config() is config)

    def put_back(self):
        seen.append(get_current_vllm_config() is config)

worker = object.__new__(type("Worker", (WorkerExtension,), {"vllm_config": config, "rank": 0}))
worker.weight_transfer_engine = Engine()
worker._hpcrl_joining = Future()
worker._hpcrl_joining.set_result(SimpleNamespace(assembly=SimpleNamespace(most=0), close=lambda: None))
worker.hpcrl_take_pieces()
worker.hpcrl_abandon()
assert get_current_vllm_config_or_none() is None
print(seen)
"""


def test_weights_are_loaded_with_the_configuration_set() -> None:
    """A load and what puts the old weights back find vLLM's configuration, as in vLLM's own update."""
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[True, True]"
