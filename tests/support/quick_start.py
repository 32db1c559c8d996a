"""The quick start, run once as the README says for all tests that look at a finished run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class QuickStart:
    """root: its run directory; status, out: how the command ended and what it printed."""

    root: Path
    status: int
    out: str


def run_quick_start(folder: Path) -> QuickStart:
    """Run examples/quickstart.toml, from the checkout, with the installed `hpcrl` and nothing in the environment that
    hpcrl needs."""
    root = folder / "run"
    command = [str(Path(sys.executable).with_name("hpcrl")), "run", "examples/quickstart.toml", "--run-dir", str(root)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    return QuickStart(root, done.returncode, done.stdout)
