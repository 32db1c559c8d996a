"""A folder of `hpcrl init`, used as its README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(sys.executable).parent


def typed_in(folder: Path, line: str, seconds: float = 300, programs: Path = PROGRAMS) -> str:
    """Type a line in a folder; what it printed, both streams together.  AssertionError if it fails.

    programs: the directory of the installed `hpcrl`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout


def begun(place: Path, task: str, more: str = "", programs: Path = PROGRAMS) -> Path:
    """Make a folder for a task in `place` and type every line of its README up to `hpcrl run`; the run directory.

    more: what is typed behind `hpcrl run`; programs: the directory of the installed `hpcrl`.
    """
    typed_in(place, f"hpcrl init {task} --task {task}", programs=programs)
    folder = place / task
    lines = [line.partition("  #")[0].strip() for line in (folder / "README.md").read_text().splitlines()]
    run, test = (next(line for line in lines if line.startswith(word)) for word in ("hpcrl run", "python "))
    assert ": good" in typed_in(folder, test, programs=programs)
    said = typed_in(folder, f"{run} {more}", programs=programs)
    (root,) = re.findall(r"^hpcrl: run directory: (\S+)$", said, re.M)
    return Path(root)


def code_of(notebook: Path) -> str:
    """The code of a notebook's cells, as one script."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
