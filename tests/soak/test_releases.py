"""What hpcrl needs of Slurm most, under every release that can be had: heterogeneous jobs, requeue, preemption, a node
that loses its power.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.able import require
from tests.support.runs import REPO
from tools.cluster import roots

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
TESTS = ("launch/slurm/test_requeue.py", "whole_runs/test_under_slurm.py", "whole_runs/test_the_cluster_itself.py")
TESTS += ("whole_runs/test_unkind_sites.py",)


@pytest.mark.parametrize("release", [roots.MACHINE, *roots.SUITES])
def test_another_release_of_slurm(release: str) -> None:
    """The tests of one release are a session of their own, as its cluster is."""
    require("cluster")
    if release != roots.MACHINE:
        try:
            print(f"{release}: Slurm {roots.make(release)}")
        except roots.RootError as error:
            pytest.skip(str(error))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cluster", *(f"tests/{name}" for name in TESTS)]
    done = subprocess.run(
        command,
        cwd=REPO,
        env=os.environ | {"CLUSTER_RELEASE": release},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-20000:]
