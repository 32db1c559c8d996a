"""`hpcrl selftest` on the CPU: every check for real, in one command, as a user starts it; and what it knows when asked
again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import REPO

pytestmark = pytest.mark.vllm


def selftest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpcrl", "selftest", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=560, check=False)


def test_every_check_passes_here(tmp_path: Path) -> None:
    """Every check passes on this machine and is not repeated."""
    done = selftest(tmp_path, "--dir", "st", "--json", "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert found["stream_order"]["text"].startswith("no GPU: ")
    assert found["ipc"]["text"].startswith("no GPU: ")
    assert found["sleep_wake"]["text"].startswith("vLLM's CPU build")
    skipped = {"stream_order", "ipc", "sleep_wake"}
    assert {name: check["result"] for name, check in found.items()} == {
        name: "skipped" if name in skipped else "passed" for name in found
    }
    assert found["engine_update"]["numbers"]["updates"] == 3 and found["save_resume"]["numbers"]["stopped_after"] >= 1
    assert found["collectives"]["numbers"]["ranks"] == 2
    begun = time.monotonic()
    (tmp_path / "st" / "results" / "bandwidth.json").unlink()
    again = selftest(tmp_path, "--resume", "st")
    assert again.returncode == 0 and "devices is known already" in again.stdout
    assert "passed   bandwidth" in again.stdout and time.monotonic() - begun < 60
