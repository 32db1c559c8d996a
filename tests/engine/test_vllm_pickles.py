"""Where vLLM's processes read by the list (races against a whole engine: tests/soak/test_gloo_races.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.engine.health import reason
from hpcrl.engine.key_guard import KEY_FILE, REALM
from hpcrl.engine.vllm_pickles import SPAWNED

PROGRAM = f"""
import runpy
runpy.run_module("hpcrl.engine.server", run_name="{SPAWNED}", alter_sys=True)
from torch.distributed import distributed_c10d
from vllm.distributed import parallel_state, utils
print(distributed_c10d._unpickler.__name__,
      parallel_state.pickle.__name__, utils.pickle.__name__)
"""


@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.parametrize("keys", [True, False])
def test_a_process_that_vllm_spawns_reads_by_the_list(tmp_path: Path, keys: bool) -> None:
    """multiprocessing runs the server's main module in it first; in a vLLM that is no engine of ours nothing is
    changed."""
    key = tmp_path / "http.key"
    key.write_text("5" * 64)
    env = {name: value for name, value in os.environ.items() if name not in (KEY_FILE, REALM)}
    env |= {KEY_FILE: str(key), REALM: "0.0"} if keys else {}
    made = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    ours = ["PlainUnpickler", "hpcrl.transport.pickles.plain", "hpcrl.transport.pickles.plain"]
    theirs = ["Unpickler", "pickle", "pickle"]
    assert made.stdout.split()[-3:] == (ours if keys else theirs), made.stderr


def test_our_own_error_in_a_worker_is_told() -> None:
    """Whatever exceptions of vLLM's follow it."""
    lines = [
        "(Worker_TP0 pid=7) ERROR 11-25 23:36:44 [a.py:1] hpcrl.errors.PeerError: a process took a place",
        "(EngineCore pid=6) ERROR 11-25 23:36:45 [b.py:1] Exception: WorkerProc initialization failed",
    ]
    assert reason(lines) == "hpcrl.errors.PeerError: a process took a place"
