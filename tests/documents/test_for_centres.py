"""The scripts that docs/slurm.md gives to administrators, run as they are printed there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from hpcrl.launch.slurm.node_events import _how
from hpcrl.run.scratch import scratch
from tests.documents.texts import REPO
from tests.support.able import needs

SCRIPTS = re.findall(r"^```bash\n(.*?)^```", (REPO / "docs/slurm.md").read_text(), re.MULTILINE | re.DOTALL)


def run(text: str, path: str = os.environ["PATH"]) -> None:
    subprocess.run(["bash"], input=text, text=True, check=True, timeout=60, env={"PATH": path})


@needs("root")
def test_the_epilog_removes_what_the_killed_have_left() -> None:
    """And not what a living process holds, nor a cache."""
    epilog = next(text for text in SCRIPTS if "# Epilog" in text)
    dead, cache = (Path(tempfile.mkdtemp(prefix=f"hpcrl-{kind}-", dir="/tmp")) for kind in ("dead", "cache"))
    (dead / ".lives").touch()
    (dead / "file").touch()
    try:
        with scratch("living") as mine:
            run(epilog)
            assert (mine / ".lives").exists() and cache.exists()
        assert not dead.exists()
    finally:
        cache.rmdir()


@pytest.mark.parametrize(("errors", "drained"), [("0\n0\n", False), ("0\n3\n", True)])
def test_the_health_check_gives_a_reason_that_counts(tmp_path: Path, errors: str, drained: bool) -> None:
    """What it tells Slurm is what hpcrl takes for broken hardware."""
    check = next(text for text in SCRIPTS if "# HealthCheckProgram" in text)
    for name, text in (("nvidia-smi", f"printf '{errors}'"), ("scontrol", f'echo "$@" > {tmp_path}/said')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run(check, f"{tmp_path}:/usr/bin:/bin")
    assert (tmp_path / "said").exists() == drained
    if drained:
        assert _how("MIXED+DRAIN", (tmp_path / "said").read_text().partition("reason=")[2]) == "drained"
