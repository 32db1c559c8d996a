"""Task folders in Harbor's form, written for a test: a sum whose verifier looks into sum.txt; and an image for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TOML = """schema_version = "1.4"
[metadata]
difficulty = "easy"
[task]
name = "tests/sum"
[verifier]
timeout_sec = 10.0
[agent]
timeout_sec = 60.0
[environment]
cpus = 1
memory_mb = 256
storage_mb = 10240
docker_image = "debian:12"
"""
VERIFIER = """#!/bin/sh
[ "$(cat sum.txt)" = 12 ] && score=1 || score=0
echo $score > /logs/verifier/reward.txt
"""


def write_task(folder: Path, toml: str = TOML, verifier: str = VERIFIER) -> Path:
    """Write one, and images.toml next to it, by which debian:12 is this machine; the task's folder."""
    files = {
        "task.toml": toml,
        "instruction.md": "Write the sum of data/numbers.txt into sum.txt.\n",
        "environment/data/numbers.txt": "3\n4\n5\n",
        "tests/test.sh": verifier,
        "solution/solve.sh": "echo $((3+4+5)) > sum.txt\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder.parent / "images.toml").write_text('"debian:12" = "system"\n')
    return folder


def write_image(root: Path, programs: tuple[str, ...] = ("sh", "cat", "chmod", "ls", "mkdir", "mv", "rm")) -> Path:
    """Write an unpacked root file system with these programs of the machine, and an empty /app; its path."""
    for name in ("bin", "app"):
        (root / name).mkdir(parents=True)
    for name in programs:
        source = Path(shutil.which(name) or "").resolve()
        shutil.copy(source, root / "bin" / name)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, timeout=60, check=True).stdout
        for library in (word for word in listed.split() if word.startswith("/")):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    return root
