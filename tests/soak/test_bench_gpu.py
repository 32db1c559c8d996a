"""bench/gpu.py as it is printed, on the CPU where there is no GPU: both ratios come out, and no result is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.runs import REPO

pytestmark = [pytest.mark.soak, pytest.mark.vllm]


def test_both_ratios_are_measured() -> None:
    command = [sys.executable, "bench/gpu.py", "--quick"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=900, check=True)
    ratios = json.loads(done.stdout.splitlines()[-1])
    assert ratios.keys() == {"sampling", "training"} and all(value > 0 for value in ratios.values())
