"""The phrase for an exit status, also of processes that really ended so."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hpcrl.run.exit_status import how_it_ended, signal_name


@pytest.mark.parametrize(
    ("code", "phrase"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("raise SystemExit(143)", "ended with exit code 143 (SIGTERM)"),
        ("raise SystemExit(137)", "ended with exit code 137 (SIGKILL; memory may have run out)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL (memory may have run out)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 2)", f"was killed by signal {signal.SIGRTMIN + 2}"),
    ],
)
def test_how_a_process_ended(code: str, phrase: str) -> None:
    assert how_it_ended(subprocess.run([sys.executable, "-c", code], check=False).returncode) == phrase


@pytest.mark.parametrize("status", [-1000, -65, 0, 1, 127, 128, 193, 255, 4096])
def test_no_status_is_an_error(status: int) -> None:
    assert how_it_ended(status) and signal_name(abs(status))
